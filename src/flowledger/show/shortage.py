"""What was asked for when memory ran out: the sizes that a finding tells, in an error's words or in the recorder's."""

import re
from typing import Any

from flowledger.ledger.reader import Ledger

IDS = ("out_of_memory", "crash")
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SIZE = r"(?<![\d.,])(\d[\d,]*(?:\.\d+)?) ?(bytes|[KMGT]iB)"
ASKED = re.compile(rf"[Tt]ried to allocate {SIZE}|{SIZE} more were asked for")
FREE = re.compile(rf"of which {SIZE} is free|{SIZE} of [\d,.]+ ?[KMGT]iB were free|{SIZE} free")


def shortages(ledger: Ledger, step: int | None = None) -> list[dict[str, Any]]:
    """The allocations that failed, in a run or in one step, as they were told: `asked` and `free` (of the device) in bytes, and where."""
    rows = ledger.rows(
        "SELECT message, step, stage, phase, rank, mini_batch, micro_batch FROM findings WHERE source <> 'plan' AND verdict = 'fail' "
        "AND list_contains(?, id) AND (?::BIGINT IS NULL OR step = ?) ORDER BY t_ns, seq",
        [list(IDS), step, step],
    )
    told = ((row.pop("message"), row) for row in rows)
    found = [{"asked": _size(ASKED.search(said)), "free": _size(FREE.search(said)), **where} for said, where in told]
    return [one for one in found if one["asked"] is not None]


def _size(found: re.Match[str] | None) -> int | None:
    if found is None:
        return None
    number, unit = (part for part in found.groups() if part is not None)
    return round(float(number.replace(",", "")) * UNITS[unit])
