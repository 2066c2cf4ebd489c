"""The peak of a step taken apart: which kinds, which tensors, what the allocator has beside them."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowledger.flow.kinds import KINDS
from flowledger.ledger.reader import Ledger
from flowledger.show.page.book import Rows, Text, text
from flowledger.show.words import human_bytes

Row = Mapping[str, Any]

LARGEST = 12  # tensors that are named
# Storages that live at an instant of a process, under the names that some stage gave them. A step watched later than their birth has no event of it.
ALIVE = """
WITH alive AS (
    SELECT storage, max(bytes) AS bytes, any_value(kind) AS kind, min(t_ns) FILTER (event = 'born') AS born_ns, max(t_ns) FILTER (event = 'freed') AS freed_ns
    FROM storages WHERE process = $process AND source <> 'plan' GROUP BY storage
    HAVING born_ns <= $t_ns AND (freed_ns IS NULL OR freed_ns > $t_ns)),
named AS (
    SELECT storage, arg_min(tensor_name, seq) AS tensor_name, arg_min(local_shape, seq) AS local_shape FROM tensors
    WHERE process = $process AND storage IS NOT NULL AND source <> 'plan' GROUP BY storage)
SELECT kind, tensor_name, count(*) AS storages, sum(bytes)::BIGINT AS bytes, any_value(local_shape) AS local_shape
FROM alive LEFT JOIN named USING (storage) GROUP BY kind, tensor_name ORDER BY bytes DESC, tensor_name
"""
# A plan has no births and deaths of what a stage holds at its fullest: the largest tensors that it touches.
TOUCHED = """
SELECT kind, tensor_name, count(DISTINCT layer) AS storages, max(bytes) AS bytes, any_value(local_shape) AS local_shape FROM accesses
WHERE source = 'plan' AND process = $process AND stage = $stage AND bytes > 0 GROUP BY kind, tensor_name ORDER BY bytes DESC, tensor_name
"""


def of(readings: Sequence[Row]) -> Row | None:
    """The peak among a process's readings of a step, by the rule of the ledger's `peaks`: for a run so large that only its highest is kept."""
    sized = [
        {**row, "peak": row["known"] if row["instant"] == "peak" and row["allocated"] is None else row["allocated"]}
        for row in readings
    ]
    there = [row for row in sized if row["peak"] is not None]
    return max(there, key=lambda row: (row["instant"] == "peak", row["peak"]), default=None)


def parts(peak: Row) -> Rows:
    """The kinds of the peak, largest first: kind, bytes, share of it, and what it is in both languages."""
    held = sorted(((peak[kind], kind) for kind in KINDS if peak[kind]), reverse=True)
    return [
        {"kind": kind, "bytes": size, "share": size / peak["peak"], "what": text(*KINDS[kind])} for size, kind in held
    ]


def tensors(ledger: Ledger, peak: Row) -> Rows:
    """The largest tensors that live at the peak, those of one name and kind together; none where nobody watched it."""
    if peak["source"] == "plan":
        return ledger.rows(TOUCHED, {"process": peak["process"], "stage": peak["stage"]})[:LARGEST]
    if peak["instant"] != "peak":
        return []
    (at,) = ledger.rows(
        "SELECT max(t_ns) AS t_ns FROM memory_readings WHERE process = $process AND step IS NOT DISTINCT FROM $step AND "
        + " AND ".join(f"{name} IS NOT DISTINCT FROM ${name}" for name in PLACE),
        {"process": peak["process"], "step": peak["step"]} | {name: peak[name] for name in PLACE},
    )
    return ledger.rows(ALIVE, {"process": peak["process"], "t_ns": at["t_ns"]})[:LARGEST]


RAN_OUT = ("oom", "crash")  # instants at which memory had run out
PLACE = ("stage", "phase", "epoch", "mini_batch", "micro_batch", "instant")


def sentences(peak: Row, readings: Sequence[Row]) -> list[Text]:
    """What to say of a step's peak: where it is, of what it is made, and what the allocator holds beside."""
    made = parts(peak)
    told = [_where(peak)]
    if made:
        english = ", ".join(f"{one['kind']} {human_bytes(one['bytes'])} ({one['share']:.0%})" for one in made)
        told.append(text(f"It is made of {english}.", f"由以下部分组成：{english.replace(', ', '，')}。"))
    if limit := max((row["limit"] or 0 for row in readings), default=0):
        ran_out = any(row["instant"] in RAN_OUT for row in readings)
        told.append(_short(limit) if ran_out and peak["peak"] <= limit else _under(peak["peak"], limit))
    return told if peak["source"] == "plan" else told + _held_back(readings)


def _where(peak: Row) -> Text:
    size, planned = human_bytes(peak["peak"]), peak["source"] == "plan"
    alive = peak["instant"] == "peak" and peak["allocated"] is None
    of = ("of live tensors", "（存活张量）") if alive else ("allocated", "（已分配）")
    place = (f"{peak['stage']}/{peak['phase']}" if peak["phase"] else peak["stage"],) * 2
    if not peak["stage"]:
        place = ("the step itself", "整步（阶段之外）")
    at = [f"{name.replace('_', '-')} {peak[name]}" for name in ("mini_batch", "micro_batch") if peak[name] is not None]
    inner = (f" ({', '.join(at)})", f"（{'，'.join(at)}）") if at else ("", "")
    return text(
        f"{'Planned peak' if planned else 'Peak'}: {size} {of[0]}, in {place[0]}{inner[0]}.",
        f"{'计划峰值' if planned else '峰值'}：{size}{of[1]}，出现在 {place[1]}{inner[1]}。",
    )


def _short(limit: int) -> Text:
    size = human_bytes(limit)
    return text(
        f"Then memory ran out: what was asked for on top did not fit under the limit of {size}, nor what others hold of it.",
        f"随后显存耗尽：再申请的部分，加上他人占用的，已超出上限 {size}。",
    )


def _under(peak: int, limit: int) -> Text:
    share, left = peak / limit, human_bytes(abs(limit - peak))
    if peak > limit:
        return text(
            f"That is {left} more than the limit of {human_bytes(limit)}: it does not fit.",
            f"比上限 {human_bytes(limit)} 多 {left}：放不下。",
        )
    return text(
        f"That is {share:.2g} of the limit of {human_bytes(limit)}; {left} are left."
        if share < 0.01
        else f"That is {share:.0%} of the limit of {human_bytes(limit)}; {left} are left.",
        f"占上限 {human_bytes(limit)} 的 {share:.2%}，剩余 {left}。",
    )


def _held_back(readings: Sequence[Row]) -> list[Text]:
    """What reserved memory beyond the allocated means."""
    both = [row for row in readings if row["reserved"] and row["allocated"] is not None]
    if not both:
        return []
    most = max(both, key=lambda row: row["reserved"])
    spare = most["reserved"] - most["allocated"]
    return [
        text(
            f"The allocator had reserved at most {human_bytes(most['reserved'])}, of which {human_bytes(spare)} "
            f"({spare / most['reserved']:.1%}) were not allocated then: kept for reuse, or in pieces too small to be of use.",
            f"分配器最多保留（reserved）{human_bytes(most['reserved'])}，其中 {human_bytes(spare)}（{spare / most['reserved']:.1%}）"
            "当时未分配：留待复用，或是碎片。",
        )
    ]
