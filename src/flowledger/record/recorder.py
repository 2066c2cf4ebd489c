"""The recorder: where a step stands, one span for each watched call, and the rows that follow from it.

It never changes what it watches, and an error of its own is counted and becomes a row, never an exception. It measures
itself: the time spent in its wrappers, and the writer's figures.
"""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

from flowledger.ledger.rows import FindingRow, SpanRow
from flowledger.record.buffers import Buffers
from flowledger.record.collectives import Collectives
from flowledger.record.edges import Edges
from flowledger.record.extract import Templates
from flowledger.record.facts import Facts
from flowledger.record.gpu.device import Device
from flowledger.record.metrics import metric_rows
from flowledger.record.models import Models
from flowledger.record.numbering import Numbering
from flowledger.record.observe import Observer
from flowledger.record.place import ALONE, Place
from flowledger.record.position import Frame, Here, inner
from flowledger.record.readings import Readings
from flowledger.record.rows_out import RowsOut, Sink
from flowledger.record.steps import ImpliedSteps, Numbers
from flowledger.record.upkeep import Failures, cost, trouble
from flowledger.record.waiting import Alarm
from flowledger.record.watch import Named, Watch, pick

clock = time.monotonic_ns
spent = time.thread_time_ns  # CPU time: what is waited for while others run is not the recorder's


class Recorder:
    """Records one process. `level`: steps, tensors or tokens; operators every `ops_every` steps (0: never).

    `groups`: of how many groups of samples the tokens are kept. `axes`: what the job calls the ranks that talk to each other.
    `place`: where this rank stands in the job's meshes. `alarm`: what to do where a collective does not end.
    `memory_history`: how many allocations a GPU's allocator is to remember, for the case that memory runs out; 0: none.
    `foreign`: the loop is another's. `bound`: who is told what symbols stand for, when the job has said so.
    """

    def __init__(
        self,
        writer: Sink,
        *,
        level: str,
        rank: int | None = 0,
        rank_count: int | None = 1,
        role: str = "actor",
        bindings: Mapping[str, int] | None = None,
        ops_every: int = 50,
        groups: int = 1,
        axes: Mapping[tuple[int, ...], str] | None = None,
        limit: int | None = None,
        place: Place = ALONE,
        alarm: Alarm | None = None,
        memory_history: int = 0,
        foreign: bool = False,
        bound: Callable[[Mapping[str, int]], None] | None = None,
    ) -> None:
        self._writer, self._out = writer, RowsOut(writer, rank, rank_count)
        self.put = self._out.put
        self.level = level
        self._ops_every = ops_every if level != "steps" else 0
        self._here = Here()
        self._root = Frame("process", "process")
        self._root.role = role
        self.latest = self._root  # the newest frame of any thread
        templates = Templates(
            bindings=bindings or {}, rank=rank, rank_count=rank_count, place=place, foreign=foreign, bound=bound
        )
        self._observer = Observer(
            self.put, lambda: self.latest, level=level, templates=templates, rank=rank or 0, groups=groups
        )  # fmt: skip
        self._models = Models(self.guard_hook, None if level == "steps" else self._observer.layers)
        self._operators: Any = None  # SampledStep, while operators are watched
        self._spans = 0
        self.own_ns = 0
        self.hurry: Callable[[], None] | None = None  # called when a step has ended
        self._troubles: dict[str, int] = {}
        who = f"rank {rank}: " if (rank_count or 1) > 1 else ""
        self._failures = Failures(self.put, who)
        numbering = Numbering(rank or 0, rank_count or 1, level=level)
        self._facts = Facts(
            self._observer, metric=self.metric, meet=self._models.meet, bind=templates.bind, numbering=numbering, rank=rank or 0,
        )  # fmt: skip
        self._device = Device(self.put, self.guard, self._observer, history=memory_history, who=who)
        self._readings = Readings(self.put, limit, level=level, device=self._device.memory, trains=rank is not None)
        self.buffer: Callable[[Any, object, Frame, int], None] = Buffers(self.put, self._observer, templates).see
        self.collectives = Collectives(self, axes or {}, alarm)
        self.edges = Edges(self)
        self._steps_implied, self._steps_of = ImpliedSteps(self.edges, level), Numbers(self.find)

    def enter(
        self, watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Frame, AbstractContextManager[Any] | None]:
        """Open the span of a call; returns its frame, and what the call is to run in, if anything."""
        if watch.plain and not self._device.on:
            return self._pass(watch), None
        began, before = clock(), spent()
        here, probe = self._here, watch.probe
        if watch.scope in ("step", "stage"):
            if self.edges.left:
                before = self._apart(before, self.edges.end, watch.scope)
            if probe.opens_step:
                before = self._apart(before, self.guard, self._steps_implied.before, probe.stage)
        frame = inner(
            self.here(),
            name=watch.name, scope=watch.scope, stage=probe.stage, phase=probe.phase, role=watch.role,
        )  # fmt: skip
        here.frame, frame.aside = frame, watch.aside
        if not frame.aside:
            self.latest = frame
        self._spans = frame.id = self._spans + 1
        frame.start_ns = began
        if self._models.hooks is not None:
            frame.tokens_before = self._models.hooks.tokens
        on_gpu = self._device.awake(watch.scope)
        around: AbstractContextManager[Any] | None = None
        if self._operators is not None:
            self._hush(True)
            around = self.guard(self._entered, watch, frame, args, kwargs, began)
            self._hush(False)
        elif watch.looks_in:
            around = self.guard(self._entered, watch, frame, args, kwargs, began)
        if on_gpu:
            self._device.entered(watch, frame)
        self.own_ns += spent() - before
        if watch.whole:
            frame.start_ns = clock()
        return frame, around

    def leave(self, watch: Watch, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Close the span of a call that returned."""
        if frame.plain and self._here.frame is frame:
            self._passed(watch, frame)
            return
        began, before = clock(), spent()
        if self._here.frame is not frame:
            before = self._apart(before, self.edges.end_within, frame)
        if self._operators is not None:
            self._hush(True)
        if watch.looks_out or frame.columns or (watch.scope == "stage" and self.level != "steps"):
            self.guard(self._left, watch, frame, args, kwargs, result, began)
        self._close(watch, frame, began, failed=False)
        if frame.done_step is not None:
            before = self._apart(before, self._done, frame.done_step)
        self.own_ns += spent() - before
        if watch.scope == "step" or watch.urgent or frame.done_step is not None:
            self._closed(watch, frame)
        if self._operators is not None:
            self._hush(False)

    def _pass(self, watch: Watch) -> Frame:
        """Open the span of a call of which nothing but its time is wanted. Between two of the job's own operations code is cold: every
        line here costs ten times what it does in a loop."""
        before = spent()
        frame = inner(
            self._here.frame or self.latest,
            name=watch.name, scope=watch.scope, stage=watch.stage, phase=watch.phase, role=watch.role,
        )  # fmt: skip
        self._here.frame = self.latest = frame
        self._spans = frame.id = self._spans + 1
        frame.plain = True
        if self._models.hooks is not None:
            frame.tokens_before = self._models.hooks.tokens
        frame.start_ns = clock()
        self.own_ns += spent() - before
        return frame

    def _passed(self, watch: Watch, frame: Frame) -> None:
        """Close it."""
        now, before = clock(), spent()
        self._span(watch, frame, "whole", now)
        self._here.back(frame)
        parent = frame.parent or self._root
        parent.policy_version = frame.policy_version
        if self.latest is frame:
            self.latest = parent
        self.own_ns += spent() - before

    def fail(self, watch: Watch, frame: Frame, error: BaseException) -> None:
        """Close the span of a call that raised; what a stage or a step did not finish becomes a finding."""
        began, before = clock(), spent()
        before = self._apart(before, self.edges.end_within, frame, error)
        self._hush(True)
        self._device.raised(frame, error, began)
        self.guard(self._failures.passed, frame, error, began)
        self._close(watch, frame, began, failed=True)
        self.own_ns += spent() - before
        self._closed(watch, frame)
        self._hush(False)

    def _apart(self, before: int, work: Callable[..., Any], *args: Any) -> int:
        """Do what ends and begins other calls, which count their own time; returns `before`, moved on by that."""
        counted = self.own_ns
        work(*args)
        return before + self.own_ns - counted

    def _done(self, step: int) -> None:
        """A step has ended, as a call has said: what comes belongs to the next, and the policy has learnt of this one."""
        self._steps_implied.end()
        self._root.step, self._root.policy_version = step + 1, step

    def concerns(self, watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is one that a conditional probe means."""
        return bool(self.guard(watch.concerns, watch.arguments(args, kwargs), self.here().stage))

    def _close(self, watch: Watch, frame: Frame, now: int, *, failed: bool) -> None:
        self.guard(self._finish, watch, frame, now)
        self._here.end(frame)
        while self.latest.over or self.latest.aside:
            self.latest = self.latest.parent or self._root
        (frame.parent or self._root).policy_version = frame.policy_version
        if self._observer.lives.dead:
            self.guard(self._observer.lives.settle)
        if watch.scope in ("stage", "step") and not failed and self.level != "steps":
            self.guard(self._observer.lives.look_for_holders, frame)

    def _closed(self, watch: Watch, frame: Frame) -> None:
        """A call is over and its time counted: the figures of a step follow, and its rows are hurried out."""
        if watch.scope == "step":
            before = spent()
            self.guard(self._end_step, frame)
            self.own_ns += spent() - before
        ends = watch.scope == "step" or (frame.done_step is not None and not frame.in_step())  # else its end follows
        if self.hurry is not None and (ends or watch.urgent):
            self.hurry()

    def see(self, watch: Watch, frame: Frame, access: str, named: Named) -> None:
        """What a call has to show before it ends."""
        began, before = clock(), spent()
        self._hush(True)
        self.guard(self._observer.see, watch, frame, access, named, began)
        self._hush(False)
        self.own_ns += spent() - before

    def here(self) -> Frame:
        """The innermost call that is open in this thread; elsewhere the newest of any."""
        return self._here.frame or self.latest

    def inmost(self) -> Frame | None:
        """The innermost call that is open in this thread, if any."""
        return self._here.frame

    def new_span(self) -> int:
        """The number of a span that this process has not had."""
        self._spans += 1
        return self._spans

    def inside_collective(self, change: int) -> None:
        """A collective begins (1) or returns (-1): what operators make meanwhile is a buffer of it."""
        if self._operators is not None:
            self._operators.mode.collective += change

    def open_spans(self) -> list[SpanRow]:
        """The begin of every collective that has not ended, the oldest first: who waits, for whom, since when. From any thread."""
        return self.collectives.open_spans()

    def metric(
        self, name: str, value: Any, frame: Frame, now: int, weight: float | None = None, raw: str | None = None
    ) -> None:
        """Write a number (or each number of a small tensor) under a canonical name; `raw`: what the job calls it."""
        for row in metric_rows(name, value, weight, raw):
            self.put(row, frame, now)

    def find(self, row: FindingRow) -> None:
        """Write what was found out about the job, or about its recording."""
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
            with suppress(Exception):  # a sink that cannot take rows must not be noticed either
                self.put(trouble(kind, error), self.latest, clock())

    def cost(self) -> dict[str, float]:
        """What recording has cost so far: CPU seconds (with the writer's thread), rows, bytes, drops, ns per row."""
        watching = self._operators.mode.own_ns if self._operators is not None else 0
        stats = getattr(self._writer, "stats", None)
        return cost(self.own_ns + watching, self._out.count, stats() if stats is not None else None, self._troubles)

    def close(self) -> None:
        """Take the hooks off and write what is still to be said; the writer stays open."""
        self.edges.end("step")
        self.collectives.close()
        self._device.close()
        self.guard(self._observer.lives.close)
        self.guard(self._models.close)

    def _entered(
        self, watch: Watch, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], now: int
    ) -> AbstractContextManager[Any] | None:
        given = watch.arguments(args, kwargs) if watch.reads or watch.read_facts else {}
        facts = dict(pick(watch.read_facts, given)) if watch.read_facts else {}
        if watch.scope == "step":
            self._begin_step(frame, facts.get("step"))
        if facts:
            self.guard(self._facts.take, facts, frame, now)
        if not watch.whole:
            self._span(watch, frame, "begin")
        if self._operators is not None:
            self._operators.began(watch, frame, now)
        if watch.scope in ("step", "stage"):
            self._readings.read(frame, "begin", now)
        if watch.reads:
            self._observer.see(watch, frame, watch.probe.argument_access, pick(watch.reads, given), now)
        if self._operators is None:
            return None
        return self._operators.around(watch, frame, facts.get("model"), self._models.wanted)  # type: ignore[no-any-return]

    def _left(
        self, watch: Watch, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, now: int
    ) -> None:
        given = watch.arguments(args, kwargs)
        if watch.write_facts:
            self.guard(self._facts.take, dict(pick(watch.write_facts, result, given)), frame, now)
        written = pick(watch.writes, result, given)
        if written:
            self._observer.see(watch, frame, watch.probe.result_access, written, now)
        if (watch.scope == "stage" or frame.columns) and self.level != "steps":
            self._observer.write_samples(frame, now)
        for name, value in watch.metrics(result):
            self.metric(name, value, frame, now)
        if watch.scope == "stage":
            self._facts.schedule(written, frame, now)

    def _finish(self, watch: Watch, frame: Frame, now: int) -> None:
        """What is written when a call ends, however it ended."""
        if self._device.on:
            self._device.left(watch, frame, now)
        self._span(watch, frame, "whole" if watch.whole else "end", now)
        if watch.boundary:
            self._readings.read(frame, "end", now)
        if self._operators is not None:
            self._operators.ended(watch, frame, now)
        elif watch.scope == "stage" and self.level != "steps":
            self._readings.known(self._observer.layers, frame, now)

    def _span(self, watch: Watch, frame: Frame, event: str, now: int | None = None) -> None:
        if now is None:
            self.put(watch.span(frame, event, None), frame, frame.start_ns)
            return
        hooks, computed = self._models.hooks, None
        if hooks is not None and hooks.tokens > frame.tokens_before:
            computed = hooks.tokens - frame.tokens_before
        self._out.ended(watch, frame, event, now, computed)

    # ---------------------------------------------------------------- steps

    def _begin_step(self, frame: Frame, number: Any) -> None:
        frame.step = self._steps_of.number(number, self._root.step)
        self._observer.begin_step()
        if self._ops_every and frame.step % self._ops_every == 0 and "torch" in sys.modules:
            from flowledger.record.sampled import SampledStep  # noqa: PLC0415  torch is wanted from here on only

            self._operators = SampledStep(self, self._observer, frame)
            self._readings.free = True

    def guard_hook(self, work: Callable[..., Any], *args: Any) -> Any:
        """`guard` for what runs in the middle of the job's own work: timed, and not seen by the operators' watch."""
        before = spent()
        if self._operators is None:
            result = self.guard(work, *args)
        else:
            hushed = self._hush(True)
            result = self.guard(work, *args)
            self._hush(hushed)
        self.own_ns += spent() - before
        return result

    def _hush(self, quiet: bool) -> bool:
        """What the recorder itself computes is not part of the step. Returns how it was."""
        if self._operators is None:
            return False
        before: bool = self._operators.mode.quiet
        self._operators.mode.quiet = quiet
        return before

    def _end_step(self, frame: Frame) -> None:
        if self._operators is not None:
            operators, self._operators = self._operators, None
            self._readings.free = False
            self._observer.sign = self._observer.lives.number_of = None
            self.own_ns += operators.mode.own_ns
            operators.write()
        for name, value in self.cost().items():
            self.metric(f"recorder/{name}", value, frame, clock())
