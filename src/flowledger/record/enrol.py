"""How a process takes part in a run: it makes the run or joins it, and gets a part of the book and a recorder.

All processes of one job have one name for it, which the run's manifest keeps: a run that another job has made is never
written to. Nothing here raises into the job that is watched; what stands in the way is one line on stderr.
"""

import os
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from flowledger.flow.errors import BadInput
from flowledger.ledger.assemble import meshes_of
from flowledger.ledger.directory import MANIFEST, RunDirectory, create, open_run
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.writer import FLUSH_S, FLUSH_S_AT_STEPS, Writer
from flowledger.record.gpu.named import named
from flowledger.record.leaving import bind, leave, stay
from flowledger.record.place import Place
from flowledger.record.recorder import Recorder
from flowledger.record.variables import GROUPS, JOB, LEVEL, MEMORY_HISTORY, OPS_EVERY, RUN, USUAL_LEVEL, first

LEVELS = ("steps", "tensors", "tokens")
PATIENCE_S = 5.0  # of a launcher with the processes that it has had ended
WAIT_S = 10.0  # for the manifest of a run that another process of the job is making


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be recorded, and where to."""

    path: Path
    level: str = USUAL_LEVEL
    ops_every: int = 0  # operator by operator every so many steps; 0: never
    groups: int = 1  # whose tokens are kept at level `tokens`
    memory_history: int = 0  # entries that a GPU's allocator remembers, for the case that memory runs out
    framework: str = "own"
    framework_version: str | None = None
    bindings: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise BadInput(f"level = {self.level!r} must be one of {', '.join(LEVELS)}")
        for symbol, size in self.bindings.items():
            if not isinstance(symbol, str) or not hasattr(size, "__index__") or int(size) < 1:
                raise BadInput(f"bindings: {symbol!r} = {size!r} must be a symbol and a whole number, such as 'G': 4")
        object.__setattr__(self, "bindings", {symbol: int(size) for symbol, size in self.bindings.items()})
        for name in ("ops_every", "groups", "memory_history"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name} = {getattr(self, name)} must be 0 or more")


def asked(run: str | os.PathLike[str] | None = None, **settings: Any) -> Wanted | None:
    """What is to be recorded: the settings that are given, else what the environment says; None where neither says where to.

    Raises BadInput, naming the variable.
    """
    path = run or os.environ.get(RUN)
    if not path:
        return None
    told: dict[str, Any] = {"level": os.environ.get(LEVEL)}
    for name, variable in (("ops_every", OPS_EVERY), ("groups", GROUPS), ("memory_history", MEMORY_HISTORY)):
        text = os.environ.get(variable) or None
        if text is not None and not text.isdecimal():
            raise BadInput(f"{variable} = {text!r} must be a whole number, such as 1")
        told[name] = int(text) if text is not None else None
    given = {name: value for name, value in settings.items() if value is not None}
    return Wanted(path=Path(path).absolute(), **{name: value for name, value in told.items() if value} | given)


@dataclass(frozen=True, slots=True)
class Enrolled:
    """A process that records."""

    path: Path  # of the run
    made: bool  # by this process
    part: Path  # its own
    role: str
    ink: Writer
    recorder: Recorder

    def close(self, state: str | None = None) -> None:
        """Write what is still to be said and leave the run; state: how this process ended, None: as the interpreter knows."""
        self.recorder.guard(self.recorder.close)
        self.ink.close()
        patience_s = PATIENCE_S if self.role == "launcher" else 0.0
        try:
            leave(self.path, self.part, state or _ended(), self.ink.stats().figures, patience_s=patience_s)
        except Exception as error:  # noqa: BLE001  somebody has removed or overwritten it: no concern of the job's
            say(f"run {self.path} cannot be closed: {error}")
            return
        if self.ink.failure is not None:
            say(f"run {self.path} ends early: {self.ink.failure.strerror}")


def enrol(
    wanted: Wanted, *, role: str = "actor", ranked: bool = True, environ: MutableMapping[str, str] = os.environ
) -> Enrolled:
    """Take part in the run at `wanted.path`; ranked: as one of the ranks that train, else as a process beside them.

    Raises BadInput where the run cannot be made, or is another job's.
    """
    rank, size = int(environ.get("RANK") or 0), int(environ.get("WORLD_SIZE") or 1)
    if not ranked:
        rank, size = 0, 1
    book, made = _book(wanted, job_of(environ), size)
    coordinates = {"dp": rank} if ranked else {}
    part = book.part(role, rank if ranked else None, coordinates=coordinates, device=named(environ))
    if not made:
        stay(wanted.path)
    ink = Writer(part, flush_s=FLUSH_S_AT_STEPS if wanted.level == "steps" else FLUSH_S)
    recorder = Recorder(
        ink, level=wanted.level, rank=rank if ranked else None, rank_count=size if ranked else None, role=role,
        bindings={**book.manifest.bindings, **wanted.bindings}, ops_every=wanted.ops_every, groups=wanted.groups, memory_history=wanted.memory_history,
        place=Place(rank=rank, meshes=meshes_of({"dp": size})), axes={tuple(range(size)): "dp"} if size > 1 else {},
        foreign=True, bound=partial(bind, wanted.path) if made or not ranked else None,
    )  # fmt: skip
    if "ray" in sys.modules:  # which ends its processes without a word
        recorder.hurry = ink.hurry
    return Enrolled(wanted.path, made, part, role, ink, recorder)


def _ended() -> str:
    """How a process ends that says nothing: by an exception that nobody has caught, or well."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        return "closed"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "crashed"


def job_of(environ: MutableMapping[str, str]) -> str:
    """The name of this job, the same in all of its processes: the one told, torchrun's own, or that of its first process."""
    if told := environ.get(JOB):
        return told
    if "TORCHELASTIC_RUN_ID" in environ:
        parts = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
        return "/".join(environ.get(part, "") for part in parts)
    return first(environ)


def _book(wanted: Wanted, job: str, size: int) -> tuple[RunDirectory, bool]:
    """The run, and whether this process has made it."""
    try:
        return create(wanted.path, _manifest(wanted, job, size)), True
    except BadInput as error:
        found = _joined(wanted.path, error)
    if found.manifest.job != job:
        raise BadInput(f"run {wanted.path} belongs to another job; choose another place for this one")
    if found.manifest.state != "open":  # `state` is also crashed where who made it was killed: the job goes on
        raise BadInput(f"run {wanted.path} is {found.state} and takes no more rows; choose another place for this job")
    return found, False


def _joined(path: Path, why_not: BadInput) -> RunDirectory:
    """The run that another process has just made, or raises why this one could not."""
    until = time.monotonic() + WAIT_S
    while not (path / MANIFEST).exists():
        if not (path / "parts").is_dir() or time.monotonic() > until:
            raise why_not
        time.sleep(0.02)
    return open_run(path)


def _manifest(wanted: Wanted, job: str, size: int) -> Manifest:
    return Manifest(
        run=wanted.path.name, level=wanted.level, framework=wanted.framework,
        framework_version=wanted.framework_version, mesh={"dp": size}, bindings=dict(wanted.bindings), job=job,
    )  # fmt: skip


def say(text: str) -> None:
    """One line to whoever watches the job."""
    print(f"flowledger: {text}", file=sys.stderr, flush=True)
