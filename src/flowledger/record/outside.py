"""Record a job from outside: where FLOWLEDGER_RUN is set, every Python process of it watches what the adapters name.

`begin` runs when the interpreter starts, so it imports next to nothing. It waits for modules of the frameworks to be
imported and wraps their functions then. A process takes part in the run when the first of them is called: who only
imports a framework leaves no trace. The rest is the recorder's: nothing that goes wrong here reaches the job.
"""

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from itertools import groupby
from typing import TYPE_CHECKING

from flowledger.flow.errors import BadInput
from flowledger.flow.seams import Missed, Probe, replace
from flowledger.record import variables
from flowledger.record.adapters import trl, verl, vllm
from flowledger.record.awaited import Awaited

if TYPE_CHECKING:
    from flowledger.record.attach import Source
    from flowledger.record.enrol import Enrolled
    from flowledger.record.recorder import Recorder

# By the name of the distribution.
FRAMEWORKS: Mapping[str, Sequence[Probe]] = {"trl": trl.PROBES, "verl": verl.PROBES, "vllm": vllm.PROBES}
# Module -> what a process is whose first call is to it, of processes that are none of the ranks that train.
ROLES: Mapping[str, str] = {**verl.ROLES, **vllm.ROLES}

_begun = False


def begin() -> None:
    """Watch this process, whose environment asks for it. The first call counts."""
    global _begun
    if _begun:
        return
    _begun = True
    if place := os.environ.get(variables.RUN):  # the same place for processes that start, or go, elsewhere
        os.environ[variables.RUN] = os.path.abspath(place)  # noqa: PTH100  pathlib is not imported for this
    os.environ.setdefault(
        "FLOWLEDGER_FIRST", os.urandom(8).hex()
    )  # for what this process starts, as `enrol` names jobs
    process, waiting = Process(), dict[str, Callable[[], None]]()
    for framework, probes in FRAMEWORKS.items():
        for name, some in groupby(sorted(probes, key=_module), _module):  # sorted keeps the order within a module
            waiting[name] = partial(process.watch, framework, name, tuple(some))
    Awaited(waiting).install()


def _module(probe: Probe) -> str:
    return probe.target.partition(":")[0]


class Process:
    """This process as the wrappers see it: a recorder that is made when it is first needed, in each fork anew."""

    def __init__(self) -> None:
        self.level = os.environ.get(variables.LEVEL) or variables.USUAL_LEVEL
        self._missed: list[Probe] = []
        self._pid = 0
        self._recorder: Recorder | None = None

    def watch(self, framework: str, module: str, probes: Sequence[Probe]) -> None:
        """Wrap functions of a module that has just been imported."""
        self._missed += _wrap(probes, partial(self.recorder, framework, ROLES.get(module)), self.level)

    def recorder(self, framework: str, role: str | None) -> "Recorder | None":
        """The recorder of this process, whose first call was to this framework; None where it cannot record, which has been said.

        role: what it is where it is none of the ranks that train.
        """
        if self._pid != os.getpid():
            self._pid, self._recorder = os.getpid(), None
            self._recorder = self._enrolled(framework, role)
        return self._recorder

    def _enrolled(self, framework: str, role: str | None) -> "Recorder | None":
        from flowledger.record.enrol import asked, enrol, say  # noqa: PLC0415
        from flowledger.record.upkeep import missed  # noqa: PLC0415

        try:
            wanted = asked(framework=framework, framework_version=_version(framework))
            if wanted is None:
                return None
            enrolled = enrol(wanted) if role is None else enrol(wanted, role=role, ranked=False)
        except Exception as error:  # noqa: BLE001  whatever it is, the job that is watched goes on
            what = error if isinstance(error, BadInput) else f"the recorder failed: {type(error).__name__}: {error}"
            say(f"{what}; this process is not recorded (pid {self._pid})")
            return None
        atexit.register(_end, enrolled, self._pid)
        recorder = enrolled.recorder
        if role is None:
            recorder.guard(_watch_collectives, recorder)
        for probe in self._missed:
            recorder.find(missed(probe))
        if enrolled.made:
            recorder.guard(_check_version, recorder, framework)
        return recorder


def _version(framework: str) -> str | None:
    try:
        return metadata.version(framework)
    except metadata.PackageNotFoundError:
        return None


def _check_version(recorder: "Recorder", framework: str) -> None:
    """Say, once a run, that nobody has tried this version of the framework."""
    from flowledger.record.enrol import say  # noqa: PLC0415
    from flowledger.record.upkeep import untested  # noqa: PLC0415
    from flowledger.record.versions import covers  # noqa: PLC0415

    version, wanted = _version(framework), FRAMEWORKS[framework][0].versions
    if version is not None and not covers(wanted, version):
        message = f"{framework} {version} is recorded as {framework} {wanted} would be; what has changed may be missed"
        say(message)
        recorder.find(untested(message))


def _watch_collectives(recorder: "Recorder") -> None:
    """From now on, where this process is one of several ranks."""
    from flowledger.record.adapters import collectives  # noqa: PLC0415
    from flowledger.record.upkeep import missed  # noqa: PLC0415

    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return
    for probe in _wrap(collectives.PROBES, lambda: recorder, recorder.level):
        recorder.find(missed(probe))


def _wrap(probes: Sequence[Probe], source: "Source", level: str) -> list[Probe]:
    """Wrap functions for good; returns the probes whose target is not there."""
    from flowledger.record.attach import makers, wants  # noqa: PLC0415  in a process that has something to watch

    gone = set()
    for target, make in makers(probes, source, level):
        try:
            replace(target, make)
        except Missed:
            gone.add(target)
    return [probe for probe in probes if probe.target in gone and wants(level, probe)]


def _end(enrolled: "Enrolled", pid: int) -> None:
    if pid == os.getpid():
        enrolled.close()
