"""Readings of memory as frameworks print them: verl and AReaL, slime."""

import re
from functools import lru_cache

from flowledger.ledger.rows import MemoryRow
from flowledger.record.importers.crashes import stage_of_reading
from flowledger.record.importers.place import Place
from flowledger.record.importers.speakers import Speaker, rank_of

GIB = 1 << 30
USAGE = re.compile(
    r"memory allocated \((?P<unit>[KMG]B)\): (?P<allocated>[\d.]+), memory reserved \([KMG]B\): (?P<reserved>[\d.]+)"
    r"(?:, device memory used/total \([KMG]B\): (?P<used>[\d.]+)/(?P<total>[\d.]+))?"
)
OLDER = re.compile(r"memory allocated: (?P<allocated>[\d.]+) ?GB, reserved: (?P<reserved>[\d.]+) ?GB")
SLIME = re.compile(r"(?:\[Rank (?P<rank>\d+)\] )?(?P<what>Memory-Usage|Peak-Memory) (?P<head>.*?): (?P<rest>[{m].*)")
FIELD = re.compile(r"'?(?P<name>\w+_GB)'?[:=] ?(?P<value>[\d.]+)")
RANK = re.compile(r"\brank:? ?(\d{1,18})\b[: ]*", re.IGNORECASE)
LOGGING = re.compile(r"^(?:\w+:)?(?:[\d\-]{10}[ T])?[\d:,.]+:|^(?:DEBUG|INFO|WARNING):|^.*\] - |^.*(?:Memory-Usage )")
UNITS = {"KB": 1 << 10, "MB": 1 << 20, "GB": GIB}


def usage(place: Place, text: str, speaker: Speaker) -> None:
    """`After update_policy, memory allocated (GB): 1.00, memory reserved (GB): …`: what the units say is 1024-based."""
    if (found := USAGE.search(text)) is None:
        return
    name, allocated, reserved, used, total = found.groups()
    unit = UNITS[name]
    head, rank = _instant(text[: found.start()], speaker.rank)
    limit = _bytes(total, unit)
    row = MemoryRow(
        instant=head, kind="total", rank=rank, stage=stage_of_reading(head), allocated=_bytes(allocated, unit),
        reserved=_bytes(reserved, unit), device_used=_bytes(used, unit) if limit else None, limit=limit or None,
    )  # fmt: skip
    place.put(row, of_a_step=row.stage is not None)


def older(place: Place, text: str, speaker: Speaker) -> None:
    """`before init cache memory allocated: 5.97GB, reserved: 6.08GB`, of verl's first versions: decimal GB."""
    if (found := OLDER.search(text)) is not None:
        head, rank = _instant(text[: found.start()], speaker.rank)
        row = MemoryRow(
            instant=head, kind="total", rank=rank, stage=stage_of_reading(head),
            allocated=_bytes(found["allocated"], 10**9), reserved=_bytes(found["reserved"], 10**9),
        )  # fmt: skip
        place.put(row, of_a_step=row.stage is not None)


def slime(place: Place, text: str, speaker: Speaker) -> None:
    """`[Rank 0] Memory-Usage before offload model: {'gpu': '0', 'total_GB': 79.1, …}`, and the peak of a phase."""
    if (found := SLIME.search(text)) is None:
        return
    told = {name: _bytes(value, GIB) for name, value in FIELD.findall(found["rest"])}
    head, rank = _instant(found["head"], rank_of(found["rank"]) if found["rank"] else speaker.rank)
    peak = found["what"] == "Peak-Memory"
    row = MemoryRow(
        instant=f"peak of {head}" if peak else head, kind="total", rank=rank, stage=stage_of_reading(head),
        allocated=told.get("allocated_GB"), reserved=told.get("reserved_GB"), device_used=told.get("used_GB"),
        host_used=told.get("host_used_GB"), limit=told.get("total_GB"),
        peak_since_stage=told.get("max_allocated_GB"), reserved_peak_since_stage=told.get("max_reserved_GB"),
    )  # fmt: skip
    if row.allocated is not None or row.peak_since_stage is not None:
        place.put(row, of_a_step=row.stage is not None)


@lru_cache(maxsize=4096)
def _instant(head: str, rank: int | None) -> tuple[str, int | None]:
    """What the reading is called, and whose it is."""
    head = LOGGING.sub("", head).strip(" ,")
    if (found := RANK.match(head)) is not None:
        rank, head = rank_of(found[1]), head[found.end() :].strip()
    return head.rstrip(":")[-120:] or "reading", rank


def _bytes(text: str | None, unit: int) -> int:
    try:
        return round(float(text) * unit) if text else 0
    except ValueError:
        return 0
