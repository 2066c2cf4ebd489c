"""The recorder: where a step stands, one span for each watched call, and the rows that follow from it.

It never changes what it watches, and an error of its own is counted and becomes a row, never an exception. It measures
itself: the time spent in its wrappers, and the writer's figures.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from flowledger.flow.seams import Probe
from flowledger.ledger.rows import FindingRow, Row, SpanRow
from flowledger.record.extract import Templates
from flowledger.record.holders import holders
from flowledger.record.layers import module_in
from flowledger.record.metrics import metric_rows
from flowledger.record.observe import Observer
from flowledger.record.position import Frame, inner
from flowledger.record.readings import Readings
from flowledger.record.watch import Watch, pick

clock = time.monotonic_ns


class Sink(Protocol):
    """Takes rows; the ledger's Writer is one."""

    def put(self, row: Row, /) -> None: ...


class _Here(threading.local):
    frame: Frame | None = None


class Recorder:
    """Records one process. `level`: steps, tensors or tokens; operators every `ops_every` steps (0: never)."""

    def __init__(
        self,
        writer: Sink,
        *,
        level: str,
        rank: int = 0,
        rank_count: int = 1,
        role: str = "actor",
        bindings: Mapping[str, int] | None = None,
        ops_every: int = 50,
        groups: int = 1,
        limit: int | None = None,
    ) -> None:
        self._writer, self._put_row = writer, writer.put
        self.level, self._rank, self._rank_count = level, rank, rank_count
        self._ops_every = ops_every if level != "steps" else 0
        self._here = _Here()
        self._root = Frame("process", "process")
        self._root.role = role
        self.latest = self._root  # the newest frame of any thread
        templates = Templates(bindings=bindings or {}, rank=rank, rank_count=rank_count)
        self._observer = Observer(
            self.put, lambda: self.latest, level=level, templates=templates, rank=rank, groups=groups
        )  # fmt: skip
        self._hooks: Any = None  # ModelHooks, from the first model on
        self._operators: Any = None  # SampledStep, while operators are watched
        self._spans = self._steps = 0
        self.own_ns = self._rows = 0
        self._troubles: dict[str, int] = {}
        self._watched: set[str] = set()  # metrics that come from the arguments of calls
        self._readings = Readings(self.put, limit, spare=level == "steps")

    # ---------------------------------------------------------------- called by the wrappers

    def enter(
        self, watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Frame, AbstractContextManager[Any] | None]:
        """Open the span of a call; returns its frame, and what the call is to run in, if anything."""
        began = clock()
        here, probe = self._here, watch.probe
        frame = inner(
            here.frame or self.latest,
            name=watch.name, scope=watch.scope, stage=probe.stage, phase=probe.phase, role=watch.role,
        )  # fmt: skip
        here.frame = self.latest = frame
        self._spans += 1
        frame.id, frame.start_ns = self._spans, began
        if self._hooks is not None:
            frame.tokens_before = self._hooks.tokens
        around: AbstractContextManager[Any] | None = None
        if watch.looks_in or self._operators is not None:
            self._hush(True)
            around = self.guard(self._entered, watch, frame, args, kwargs, began)
            self._hush(False)
        now = clock()
        self.own_ns += now - began
        if watch.whole:
            frame.start_ns = now
        return frame, around

    def leave(self, watch: Watch, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Close the span of a call that returned."""
        began = clock()
        self._hush(True)
        if watch.looks_out or watch.scope == "stage":
            self.guard(self._left, watch, frame, args, kwargs, result, began)
        self._close(watch, frame, began, failed=False)
        self._hush(False)
        self.own_ns += clock() - began

    def fail(self, watch: Watch, frame: Frame) -> None:
        """Close the span of a call that raised."""
        began = clock()
        self._hush(True)
        self._close(watch, frame, began, failed=True)
        self._hush(False)
        self.own_ns += clock() - began

    def _close(self, watch: Watch, frame: Frame, now: int, *, failed: bool) -> None:
        self.guard(self._finish, watch, frame, now)
        parent = frame.parent or self._root
        self._here.frame = parent if parent is not self._root else None
        self.latest = parent
        parent.policy_version = frame.policy_version
        if self._observer.lives.dead:
            self.guard(self._observer.lives.settle)
        if watch.scope in ("stage", "step"):
            if not failed:
                self.guard(self._look_for_holders, frame)
            if watch.scope == "step":
                self.guard(self._end_step, frame)

    # ---------------------------------------------------------------- rows

    def put(self, row: Row, frame: Frame, now: int) -> None:
        """Write a row at a position."""
        row.t_ns, row.rank, row.rank_count = now, self._rank, self._rank_count
        frame.stamp(row)
        self._rows += 1
        self._put_row(row)

    def metric(self, name: str, value: Any, *, frame: Frame | None = None, now: int | None = None) -> None:
        """Write a number (or each number of a small tensor) under a canonical name."""
        for row in metric_rows(name, value):
            self.put(row, frame or self.latest, now or clock())

    def wants(self, probe: Probe) -> bool:
        """Whether this level has a span for each call. At `steps`, decode steps and calls without a phase go unseen."""
        return self.level != "steps" or probe.scope not in ("decode", "call") or probe.phase is not None

    def missed(self, probe: Probe) -> None:
        """A probe found nothing to watch."""
        versions = f" (wanted versions {probe.versions})" if probe.versions else ""
        verdict, severity = ("skipped", "info") if probe.optional else ("warn", "warning")
        message = f"{probe.target} is not there{versions}; what it does is not recorded"
        row = FindingRow(id="probe_missed", verdict=verdict, severity=severity, message=message, needs=[probe.target])
        self.put(row, self._root, clock())

    def guard(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run a part of the recorder; an error of its own is counted and, once a kind, becomes a row."""
        try:
            return work(*args)
        except Exception as error:  # noqa: BLE001  the job that is watched must not notice
            self._trouble(f"{type(error).__name__} in {getattr(work, '__name__', '?')}", error)
            return None

    def _trouble(self, kind: str, error: Exception) -> None:
        self._troubles[kind] = self._troubles.get(kind, 0) + 1
        if self._troubles[kind] == 1:
            message = f"{kind}: {error}"[:500]
            self.put(
                FindingRow(id="recorder_error", verdict="warn", severity="warning", message=message),
                self.latest,
                clock(),
            )

    def cost(self) -> dict[str, float]:
        """What recording has cost so far: CPU seconds (with the writer's thread), rows, bytes, drops, ns per row."""
        stats = getattr(self._writer, "stats", None)
        written = stats() if stats is not None else None
        own = self.own_ns + (self._operators.mode.own_ns if self._operators is not None else 0)
        total = own + (written.cpu_ns if written is not None else 0)
        return {
            "cpu_s": total / 1e9,
            "rows": self._rows,
            "bytes": written.bytes if written is not None else 0,
            "dropped": written.dropped if written is not None else 0,
            "ns_per_row": total / max(1, self._rows),
            "errors": sum(self._troubles.values()),
        }

    def close(self) -> None:
        """Take the hooks off and write what is still to be said; the writer stays open."""
        self.guard(self._observer.lives.close)
        if self._hooks is not None:
            self.guard(self._hooks.close)

    # ---------------------------------------------------------------- one call

    def _entered(
        self, watch: Watch, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], now: int
    ) -> AbstractContextManager[Any] | None:
        given = watch.arguments(args, kwargs)
        facts = dict(pick(watch.read_facts, given)) if watch.read_facts else {}
        if watch.scope == "step":
            self._begin_step(frame, facts.get("step"))
        if facts:
            self._take(facts, frame, now)
        if not watch.whole:
            self._span(watch, frame, "begin")
        if self._operators is not None:
            self._operators.began(watch, frame, now)
        if watch.scope in ("step", "stage"):
            self._readings.read(frame, "begin", now)
        if watch.reads:
            self._observer.see(watch, frame, "read", pick(watch.reads, given), now)
        if self._operators is None:
            return None
        return self._around_step() if watch.scope == "step" else self._around_forward(watch, frame, facts.get("model"))

    def _left(
        self, watch: Watch, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, now: int
    ) -> None:
        given = watch.arguments(args, kwargs)
        if watch.write_facts:
            self._take(dict(pick(watch.write_facts, result, given)), frame, now)
        written = pick(watch.writes, result, given)
        if written:
            self._observer.see(watch, frame, "write", written, now)
        if watch.scope == "stage" and self.level != "steps":
            self._observer.write_samples(frame, now)
        for name, value in watch.metrics(result):
            self.metric(name, value, frame=frame, now=now)
        for name, value in written if watch.scope == "stage" else ():
            if name == "generation_metadata":
                self._schedule(value, frame, now)

    def _finish(self, watch: Watch, frame: Frame, now: int) -> None:
        """What is written when a call ends, however it ended."""
        self._span(watch, frame, "whole" if watch.whole else "end", now)
        if watch.boundary:
            self._readings.read(frame, "end", now)
        if self._operators is not None:
            self._operators.ended(watch, frame, now)
        elif watch.scope == "stage" and self.level != "steps":
            self._readings.known(self._observer.layers, frame, now)

    def _span(self, watch: Watch, frame: Frame, event: str, now: int | None = None) -> None:
        row: SpanRow = watch.row.__copy__()  # type: ignore[attr-defined]  # twice as quick as copy.copy
        row.id, row.event, row.start_ns, row.end_ns = frame.id, event, frame.start_ns, now
        if frame.parent is not None and frame.parent.id:
            row.parent = frame.parent.id
        if now is not None:
            row.tokens_logical, row.tokens_valid = frame.tokens_logical, frame.tokens_valid
            if self._hooks is not None and self._hooks.tokens > frame.tokens_before:
                row.tokens_computed = self._hooks.tokens - frame.tokens_before
            if row.comm_type is not None:
                row.latency_ms = (now - frame.start_ns) / 1e6
        self.put(row, frame, now if now is not None else frame.start_ns)

    def _take(self, facts: Mapping[str, Any], frame: Frame, now: int) -> None:
        """Facts that are no tensors."""
        columns = {}
        for name, value in facts.items():
            if name == "policy_version":
                frame.policy_version = int(value)
            elif name == "tokenizer":
                self._observer.tokens.tokenizer = value
            elif name == "model":
                self._meet(value)
            elif name.startswith("metric:"):
                self._watched.add(name[7:])
                self.metric(name[7:], value, frame=frame, now=now)
            elif name.startswith("token:"):
                columns[name[6:]] = value
            elif name != "step":
                self._observer.facts[name] = value
        if columns:
            self._observer.token_values(frame, columns, now)

    def _schedule(self, metadata: Any, frame: Frame, now: int) -> None:
        """Running and waiting samples of each decode step, where no decode step was watched itself."""
        if metadata.device.type == "cpu" and "rollout/running" not in self._watched:
            for running, waiting in metadata.tolist():
                self.metric("rollout/running", running, frame=frame, now=now)
                self.metric("rollout/waiting", waiting, frame=frame, now=now)

    # ---------------------------------------------------------------- steps

    def _begin_step(self, frame: Frame, number: Any) -> None:
        frame.step = int(number) if number is not None else self._steps
        self._steps += 1
        self._observer.begin_step()
        if self._ops_every and frame.step % self._ops_every == 0 and "torch" in sys.modules:
            from flowledger.record.sampled import SampledStep  # noqa: PLC0415  torch is wanted from here on only

            self._operators = SampledStep(self, self._observer, frame)

    def _around_step(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(self._operators.watching())
        stack.enter_context(self._model_hooks().saving(self._operators.saved))
        return stack

    def _around_forward(self, watch: Watch, frame: Frame, model: Any) -> AbstractContextManager[Any] | None:
        """On the first micro-batch of a sampled step, see into the forward pass."""
        if watch.probe.phase != "forward" or module_in(model) is None:
            return None
        if frame.epoch or frame.mini_batch or frame.micro_batch:
            return None
        return self._operators.forward(self._model_hooks(), module_in(model), frame)  # type: ignore[no-any-return]

    def _meet(self, value: Any) -> None:
        module = module_in(value)
        if module is not None and (self._hooks is None or not self._hooks.knows(module)):
            self._observer.layers.meet(module)
            self._model_hooks().meet(module)

    def _model_hooks(self) -> Any:
        if self._hooks is None:
            from flowledger.record.hooks import ModelHooks  # noqa: PLC0415  torch is wanted from here on only

            self._hooks = ModelHooks(self.guard_hook)
        return self._hooks

    def guard_hook(self, work: Callable[..., Any], *args: Any) -> None:
        """`guard` for what runs in the middle of the job's own work: timed, and not seen by the operators' watch."""
        began = clock()
        hushed = self._hush(True)
        self.guard(work, *args)
        self._hush(hushed)
        self.own_ns += clock() - began

    def _hush(self, quiet: bool) -> bool:
        """What the recorder itself computes is not part of the step. Returns how it was."""
        if self._operators is None:
            return False
        before: bool = self._operators.mode.quiet
        self._operators.mode.quiet = quiet
        return before

    def _look_for_holders(self, frame: Frame) -> None:
        overdue = list(self._observer.lives.overdue(frame))
        found = holders(life.pointer for life in overdue) if overdue else {}
        for life in overdue:
            who = found.get(life.pointer) or ("autograd graph" if life.graph else "unknown")
            self._observer.lives.held(life, who, frame, clock())

    def _end_step(self, frame: Frame) -> None:
        if self._operators is not None:
            operators, self._operators = self._operators, None
            self._observer.sign, self._observer.lives.number_of = None, lambda pointer: None
            self.own_ns += operators.mode.own_ns
            operators.write()
        for name, value in self.cost().items():
            self.metric(f"recorder/{name}", value, frame=frame)
