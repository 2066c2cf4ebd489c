"""Numbers that come in several: one a rank, one a run. What differs between them says more than any one of them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

WHOLE = 0.03  # how far from a whole number a ratio of two measured numbers may be
RANK = re.compile(r"^(?:rank|worker|gpu|dp)[ _-]?(\d+)$", re.IGNORECASE)
TIMES, LONGEST, SUMS = (
    ("s", "seconds", "time", "time_s"),
    ("max", "longest", "max_tokens"),
    ("total", "sum", "tokens", "total_tokens"),
)


def facts_of_ranks(measured: Mapping[str, Any]) -> dict[str, Any]:
    """From `rank0: …, rank3: …`: counts that differ, or time against the longest sample and against the sum."""
    ranks = {int(match[1]): value for key, value in measured.items() if (match := RANK.match(str(key)))}
    if len(ranks) < 2:
        return {}
    rows = [ranks[rank] for rank in sorted(ranks)]
    if all(isinstance(row, int) for row in rows):
        return {"count_one": min(rows), "count_other": max(rows)}
    if not all(isinstance(row, Mapping) for row in rows) or len(rows) < 3:
        return {}
    times, longest, sums = (_column(rows, names) for names in (TIMES, LONGEST, SUMS))
    if not times:
        return {}
    found: dict[str, Any] = {"slowest_s": max(times), "fastest_s": min(times)}
    found |= {"longest_tokens": max(longest), "time_by_longest": _agreement(times, longest)} if longest else {}
    return {**found, "time_by_sum": _agreement(times, sums)} if sums else found


def facts_of_two(measured: Mapping[str, Any]) -> dict[str, Any]:
    """`scale_ratio`: where two numbers were measured and the one is a whole multiple of the other."""
    numbers = [float(value) for value in measured.values() if isinstance(value, int | float) and value]
    if len(measured) != 2 or len(numbers) != 2:
        return {}
    low, high = sorted(numbers, key=abs)
    ratio = high / low
    return {"scale_ratio": round(ratio)} if 2 <= ratio <= 64 and abs(ratio / round(ratio) - 1) < WHOLE else {}


def facts_of_runs(measured: Mapping[str, Any]) -> dict[str, Any]:
    """From `allocated: {a: …, b: …}` beside `fragmentation: {a: …, b: …}`: what fell and what rose from the one run to the other."""
    found: dict[str, Any] = {}
    for word in ("allocated", "fragmentation", "logp_diff", "residu"):
        pair = next((_pair(value) for key, value in measured.items() if word in str(key) and _pair(value)), None)
        if pair:
            found[f"{word}_first"], found[f"{word}_last"] = pair
    return found


def _pair(value: object) -> tuple[float, float] | None:
    if isinstance(value, Mapping):
        numbers = [one for one in value.values() if isinstance(one, int | float)]
        rising = [one for one in value.values() if _rising(one)]
        if rising:
            return float(rising[0][0]), float(rising[0][-1])
        return (float(numbers[0]), float(numbers[-1])) if len(numbers) > 1 else None
    if isinstance(value, list) and len(value) == 2 and all(isinstance(one, int | float) for one in value):
        return float(value[0]), float(value[1])
    return (float(value[0]), float(value[-1])) if isinstance(value, list) and _rising(value) else None


def _rising(value: object) -> bool:
    """A series that stays and then jumps."""
    if not isinstance(value, list) or len(value) < 3 or not all(isinstance(one, int | float) for one in value):
        return False
    return bool(value[-1] > 3 * max(value[0], 1e-12))


def _column(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[float]:
    found = [next((row[name] for name in names if isinstance(row.get(name), int | float)), None) for row in rows]
    return [float(one) for one in found if one is not None] if None not in found else []


def _agreement(one: Sequence[float], other: Sequence[float]) -> float:
    """Share of pairs that both order alike (Kendall): 1 for the same order."""
    pairs = [(i, j) for i in range(len(one)) for j in range(i)]
    return sum((one[i] - one[j]) * (other[i] - other[j]) > 0 for i, j in pairs) / len(pairs)
