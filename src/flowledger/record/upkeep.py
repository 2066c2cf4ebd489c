"""What the recorder says of itself: its cost, its errors, and what it could not watch."""

from collections.abc import Mapping
from typing import Protocol

from flowledger.flow.seams import Probe
from flowledger.ledger.rows import FindingRow


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


def trouble(kind: str, error: Exception) -> FindingRow:
    """An error of the recorder itself."""
    return FindingRow(id="recorder_error", verdict="warn", severity="warning", message=f"{kind}: {error}"[:500])
