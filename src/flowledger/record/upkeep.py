"""What the recorder says of itself: its cost, its errors, and what it could not watch."""

from collections.abc import Callable, Mapping
from typing import Protocol

from flowledger.flow.lost import lost
from flowledger.flow.seams import Probe
from flowledger.ledger.rows import FindingRow, Row
from flowledger.record.position import Frame

Put = Callable[[Row, Frame, int], None]


class Written(Protocol):
    """What a writer has done so far."""

    @property
    def bytes(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    @property
    def cpu_ns(self) -> int: ...


def cost(own_ns: int, rows: int, written: Written | None, troubles: Mapping[str, int]) -> dict[str, float]:
    """The figures of one moment; CPU time is that of the wrappers and of the writer's thread."""
    total = own_ns + (written.cpu_ns if written is not None else 0)
    return {
        "cpu_s": total / 1e9,
        "rows": rows,
        "bytes": written.bytes if written is not None else 0,
        "dropped": written.dropped if written is not None else 0,
        "ns_per_row": total / max(1, rows),
        "errors": sum(troubles.values()),
    }


def missed(probe: Probe) -> FindingRow:
    """A target that is not there."""
    versions = f" (wanted versions {probe.versions})" if probe.versions else ""
    verdict, severity = ("skipped", "info") if probe.optional else ("warn", "warning")
    message = f"{probe.target} is not there{versions}; what it does is not recorded"
    return FindingRow(id="probe_missed", verdict=verdict, severity=severity, message=message, needs=[probe.target])


def untested(message: str) -> FindingRow:
    """A framework of a version that nobody has tried."""
    return FindingRow(id="version_untested", verdict="warn", severity="warning", message=message)


def trouble(kind: str, error: Exception) -> FindingRow:
    """An error of the recorder itself."""
    return FindingRow(id="recorder_error", verdict="warn", severity="warning", message=f"{kind}: {error}"[:500])


class Failures:
    """Exceptions on their way out: one finding for each that leaves an outermost stage, or a step outside of stages.

    The finding stands where the exception was first seen. One that is caught on its way stops nothing, and is none.
    """

    def __init__(self, put: Put, who: str = "") -> None:
        self._put, self._who = put, who  # `rank 1: `, where there are several
        self._error, self._told = 0, False  # its id, for the exception itself would keep its frames' tensors alive
        self._first: Frame | None = None  # the innermost call that it left

    def passed(self, frame: Frame, error: BaseException, now: int) -> None:
        """An exception leaves a call. A generator that is given up has not failed."""
        if isinstance(error, GeneratorExit):
            return
        if self._first is None or self._error != id(error) or not self._first.within(frame):
            self._error, self._first, self._told = id(error), frame, False
        outermost = frame.scope == "stage" and (frame.parent is None or frame.parent.stage_frame.scope != "stage")
        if not self._told and (outermost or frame.scope == "step"):
            self._told = True
            self._put(_failed(self._who, self._first, error), self._first, now)
        if frame.scope == "step":
            self._first = None


def _failed(who: str, frame: Frame, error: BaseException) -> FindingRow:
    """What an exception says; one that only says that another rank is gone, or that the run is to end, is a warning."""
    place = "/".join(part for part in (frame.stage, frame.phase) if part) or frame.name
    text = next(iter(str(error).splitlines()), "")
    how, broken = f"raised {type(error).__name__}{': ' if text else ''}{text}", lost(error)
    if isinstance(error, KeyboardInterrupt):
        how = "was interrupted"
    elif broken is not None:
        how = f"was cut off, for a rank that it talks to is gone: {broken}"
    own = broken is None and isinstance(error, Exception)
    verdict, severity = ("fail", "error") if own else ("warn", "warning")
    message = f"{who}{place} {how}"[:500]
    return FindingRow(id="call_failed", verdict=verdict, severity=severity, message=message)
