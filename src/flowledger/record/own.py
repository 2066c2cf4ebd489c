"""Record a loop of one's own: `with flowledger.recorder(RUN) as rec`, `rec.stage(name)`, `rec.tensors(name=tensor, …)`."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from flowledger.flow.errors import BadInput, nearest
from flowledger.flow.seams import Probe
from flowledger.flow.stages import stages
from flowledger.flow.tensors import tensors
from flowledger.ledger.rows import FindingRow
from flowledger.record.enrol import asked, enrol, say
from flowledger.record.position import Frame
from flowledger.record.recorder import Recorder, clock
from flowledger.record.watch import Watch

WITHIN = ("epoch", "mini_batch", "micro_batch")
ACCESS = ("write", "read")
FIRST = {"prompt", "rollout"}  # the stages that a step begins with


@contextmanager
def recorder(
    run: str | os.PathLike[str] | None = None,
    *,
    level: str | None = None,
    ops_every: int | None = None,
    groups: int | None = None,
    bindings: Mapping[str, int] | None = None,
) -> Iterator["OwnLoop"]:
    """Record a loop of your own into a new run, from one process or from every rank that torchrun has started.

    run: where to; None: where `flowledger record -o RUN -- python mine.py` says, and nowhere without it. level: steps,
    tensors (the usual) or tokens. ops_every: operator by operator every so many steps; 0, the usual: never. groups: of how
    many groups of samples the tokens are kept. bindings: what a dimension's symbol stands for, `{"B_prompt": 8, "G": 4}`.
    Raises BadInput where these are wrong. Where the run cannot be written one line says so, and the loop goes on.
    """
    wanted = asked(run, level=level, ops_every=ops_every, groups=groups, bindings=bindings)
    if wanted is None:
        yield OwnLoop(None)
        return
    try:
        enrolled = enrol(wanted)
    except BadInput as error:
        say(f"{error}; nothing is recorded")
        yield OwnLoop(None)
        return
    state = "crashed"
    try:
        yield OwnLoop(enrolled.recorder)
        state = "closed"
    except KeyboardInterrupt:
        state = "interrupted"
        raise
    finally:
        enrolled.close(state)
        if run is not None and enrolled.made:
            say(f"recorded in {enrolled.path}; look: flowledger show {enrolled.path} stages")


def called(name: str) -> str:
    """What the flow calls a tensor that is told by a name of the frameworks; any other name as it is."""
    return next((row.name for row in tensors().values() if name in row.aliases), name)


class OwnLoop:
    """What a loop tells of itself. What it tells wrongly becomes a finding, never an exception."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self._open: list[tuple[Watch, Frame]] = []
        self._watches: dict[str, Watch] = {}
        self._done: set[str] = set()  # stages of the step
        self._told: set[str] = set()  # wrong names

    @contextmanager
    def step(self, number: int | None = None) -> Iterator[None]:
        """One step, numbered from 0 where no number is given.

        Without it the next step begins with a stage that this one has had, or with a prompt or rollout after anything else.
        """
        self._done = set()
        with self._span("step", "step", {"step": number}):
            yield

    @contextmanager
    def stage(self, name: str, *, policy_version: int | None = None) -> Iterator[None]:
        """One stage by its name in the flow: `rollout`, `reward`, `update_actor`, …; of which weights, where that is known."""
        if self._recorder is None or not self._is(name, stages(), "stage"):
            yield
            return
        if not self._open and (not self._done or name in self._done or (name in FIRST and self._done - FIRST)):
            self._done.clear()
            self._next_step()
        self._done.add(name)
        with self._span("stage", name, {"version": policy_version}):
            yield

    @contextmanager
    def within(self, scope: str) -> Iterator[None]:
        """One `epoch`, `mini_batch` or `micro_batch` of the stage that is open; they are counted."""
        if not self._is(scope, WITHIN, "part of a stage"):
            yield
            return
        with self._span(scope, scope, {}):
            yield

    def tensors(self, access: Any = "write", /, **named: Any) -> None:
        """Tensors, a model or an optimizer by name in the flow; `write`: the open stage has made them, `read`: it reads them."""
        known = [(called(name), value) for name, value in named.items() if self._is(called(name), tensors(), "tensor")]
        if self._recorder is not None and self._is(access, ACCESS, "access"):
            watch, frame = self._open[-1] if self._open else (self._watch("call", "tensors"), self._recorder.here())
            self._recorder.see(watch, frame, access, known)

    def metrics(self, **numbers: Any) -> None:
        """Numbers, or small tensors of them, by name."""
        if self._recorder is not None:
            for name, value in numbers.items():
                self._recorder.guard(self._recorder.metric, name, value, self._recorder.here(), clock())

    def _next_step(self) -> None:
        if self._recorder is not None:
            self._recorder.edges.begin(self._watch("step", "step"), (), {})

    @contextmanager
    def _span(self, scope: str, name: str, given: dict[str, Any]) -> Iterator[None]:
        if self._recorder is None:
            yield
            return
        watch = self._watch(scope, name)
        frame, around = self._recorder.enter(watch, (), given)
        self._open.append((watch, frame))
        try:
            with around or nullcontext():
                yield
        except BaseException as error:
            self._recorder.fail(watch, frame, error)
            raise
        else:
            self._recorder.leave(watch, frame, (), given, None)
        finally:
            self._open.pop()

    def _watch(self, scope: str, name: str) -> Watch:
        if name not in self._watches:
            probe = Probe(
                stage=name if scope == "stage" else None, target=f"flowledger:{name}", scope=scope,
                args={"step": "@step"} if scope == "step" else {"version": "@policy_version"},
            )  # fmt: skip
            level = self._recorder.level if self._recorder is not None else "steps"
            self._watches[name] = Watch(probe, self._watch, level)
        return self._watches[name]

    def _is(self, name: Any, known: Iterable[str], what: str) -> bool:
        """Whether a name is known; one that is not becomes a finding, once."""
        if isinstance(name, str) and name in known:
            return True
        name = name if isinstance(name, str) else f"a {type(name).__name__}"
        if self._recorder is not None and name not in self._told:
            self._told.add(name)
            hint = nearest(name, known)
            message = f"no {what} is called {name!r}, and it is not recorded{hint}"
            row = FindingRow(id="name_unknown", verdict="warn", severity="warning", message=message)
            self._recorder.put(row, self._recorder.here(), clock())
        return False
