"""What an allocator held back: the reading with the most reserved, and what of that was not allocated then."""

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]


def most_reserved(readings: Iterable[Row]) -> Row | None:
    """Where the most was reserved; of equal ones where the most was allocated, then the first. None where nobody counted both."""
    both = [row for row in readings if row["reserved"] and row["allocated"] is not None]
    return max(both, key=lambda row: (row["reserved"], row["allocated"]), default=None)


def held_back(reading: Row) -> int:
    """Bytes that were reserved and not allocated: kept for reuse, or in pieces too small to be of use."""
    return max(0, int(reading["reserved"]) - int(reading["allocated"]))
