"""The peak of a step taken apart: which kinds, which tensors, what the allocator has beside them."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from flowledger.flow.kinds import KINDS
from flowledger.flow.tensors import tensors as tensors_of_flow
from flowledger.ledger.reader import Ledger
from flowledger.show.allocator import held_back, most_reserved
from flowledger.show.page.book import Rows, Text, text
from flowledger.show.words import human_bytes

Row = Mapping[str, Any]

LARGEST = 12  # tensors that are named
NAMED = ("kind", "tensor_name", "storages", "bytes", "local_shape")  # what is said of each
# Storages that live at instants of processes, under the names that some stage gave them. A step watched later than their birth has no event of it.
ALIVE = """
WITH wanted AS (SELECT unnest($instants, recursive := true)),
lived AS (
    SELECT process, storage, max(bytes) AS bytes, any_value(kind) AS kind, min(t_ns) FILTER (event = 'born') AS born_ns, max(t_ns) FILTER (event = 'freed') AS freed_ns
    FROM storages WHERE process IN (SELECT process FROM wanted) AND source <> 'plan' GROUP BY process, storage),
named AS (
    SELECT process, storage, arg_min(tensor_name, seq) AS tensor_name, arg_min(local_shape, seq) AS local_shape FROM tensors
    WHERE process IN (SELECT process FROM wanted) AND storage IS NOT NULL AND source <> 'plan' GROUP BY process, storage)
SELECT process, t_ns, kind, tensor_name, count(*) AS storages, sum(bytes)::BIGINT AS bytes, any_value(local_shape) AS local_shape
FROM wanted JOIN lived USING (process) LEFT JOIN named USING (process, storage)
WHERE born_ns <= t_ns AND (freed_ns IS NULL OR freed_ns > t_ns) GROUP BY process, t_ns, kind, tensor_name ORDER BY bytes DESC, tensor_name
"""
# A plan has no births and deaths of what a stage holds at its fullest: the largest tensors that it touches. Of each the largest layer.
TOUCHED = """
WITH layers AS (
    SELECT kind, tensor_name, layer, max(bytes) AS bytes, arg_max(local_shape, bytes) AS local_shape, arg_max(dims, bytes) AS dims FROM accesses
    WHERE source = 'plan' AND process = $process AND stage = $stage AND bytes > 0 GROUP BY kind, tensor_name, layer)
SELECT kind, tensor_name, count(layer) AS layers, max(bytes) AS bytes, sum(bytes)::BIGINT AS total_bytes,
    arg_max(local_shape, bytes) AS local_shape, arg_max(dims, bytes) AS dims
FROM layers GROUP BY kind, tensor_name ORDER BY bytes DESC, tensor_name
"""
TOGETHER = ("param", "grad", "optimizer", "kv_cache")  # kinds whose layers live at one time: only of these a sum is one


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


def tensors(ledger: Ledger, peak: Row, others: Rows) -> Rows:
    """The largest tensors that live at the peak, those of one name and kind together; none where nobody watched it.

    `others`: the peaks that are asked for besides, which are read together with it.
    """
    if peak["source"] == "plan":
        found = ledger.rows(TOUCHED, {"process": peak["process"], "stage": peak["stage"]})[:LARGEST]
        return [_planned(row) for row in found]
    if peak["instant"] != "peak":
        return []
    at = _instant(peak)
    instants = [_instant(row) for row in others if row["instant"] == "peak" and row["source"] != "plan"]
    found = ledger.rows(ALIVE, {"instants": instants if at in instants else [at]})
    here = [row for row in found if _instant(row) == at][:LARGEST]
    return [{name: row[name] for name in NAMED} for row in here]


def _planned(row: Row) -> dict[str, Any]:
    """`storages`: layers times what a layer has of it; `total_bytes`: of all of them, where they live at one time."""
    each = pieces(row["tensor_name"], row["dims"])
    total = row["total_bytes"] * each if row["kind"] in TOGETHER else None
    return {**row, "each": each, "storages": (row["layers"] or 1) * each, "total_bytes": total}


def pieces(name: str, dims: str | None) -> int:
    """How many of a form a layer has, as the flow stacks them for the model: of `[L, 2, …]` two, keys and values."""
    forms = tensors_of_flow()[name].forms if name in tensors_of_flow() else ()
    here = {f"{name}/{form.name}": form.shape[1:-1] for form in forms if form.shape[1:-1] == dims}
    for form in forms:
        if (part := here.get(form.source or "")) is not None:
            front = form.shape[1:-1].removesuffix(part).split(",")
            return prod(int(size) for size in map(str.strip, front) if size.isdecimal())
    return 1


def pool(peak: Row, largest: Rows) -> Text | None:
    """Of a planned KV cache: why its slots come to less than the pool that the engine takes."""
    slots = next((row for row in largest if row["kind"] == "kv_cache"), None)
    if peak["source"] != "plan" or slots is None or not peak["kv_cache"] or len(slots["local_shape"] or ()) != 4:
        return None
    held, rest = slots["total_bytes"], peak["kv_cache"] - slots["total_bytes"]
    many, positions = slots["local_shape"][0], slots["local_shape"][2]
    if rest <= 0:
        return None
    sizes = [human_bytes(size) for size in (peak["kv_cache"], held, rest)]
    return text(
        f"The pool of the KV cache has {sizes[0]}: {many:,} slots of {positions:,} positions take {sizes[1]}; {sizes[2]} are left.",
        f"KV 缓存池共 {sizes[0]}：{many:,} 个槽位、每个 {positions:,} 个位置，占 {sizes[1]}；剩余 {sizes[2]}。",
    )


def _instant(row: Row) -> dict[str, Any]:
    return {"process": row["process"], "t_ns": row["t_ns"]}


RAN_OUT = ("oom", "crash")  # instants at which memory had run out
PLACE = ("stage", "phase", "epoch", "mini_batch", "micro_batch", "instant")


def sentences(peak: Row, readings: Sequence[Row], shortages: Sequence[Row] = ()) -> list[Text]:
    """What to say of a step's peak: where it is, of what it is made, what was asked for in vain, what the allocator holds beside."""
    made = parts(peak)
    told = [_where(peak)]
    if made:
        english = ", ".join(f"{one['kind']} {human_bytes(one['bytes'])} ({one['share']:.0%})" for one in made)
        told.append(text(f"It is made of {english}.", f"由以下部分组成：{english.replace(', ', '，')}。"))
    if limit := max((row["limit"] or 0 for row in readings), default=0):
        ran_out = any(row["instant"] in RAN_OUT for row in readings)
        told.append(_short(limit, shortages) if ran_out and peak["peak"] <= limit else _under(peak["peak"], limit))
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


def _short(limit: int, shortages: Sequence[Row]) -> Text:
    """`shortages`: allocations that failed; the first is what memory ran out for."""
    size = human_bytes(limit)
    if not shortages:
        return text(
            f"Then memory ran out: what was asked for on top did not fit under the limit of {size}, nor what others hold of it.",
            f"随后显存耗尽：再申请的部分，加上他人占用的，已超出上限 {size}。",
        )
    asked, free = human_bytes(shortages[0]["asked"]), shortages[0]["free"]
    left = text("", "") if free is None else text(f", {human_bytes(free)} were free", f"，当时剩余 {human_bytes(free)}")
    return text(
        f"Then memory ran out: {asked} more were asked for{left['en']}; the limit is {size}.",
        f"随后显存耗尽：再申请 {asked}{left['zh']}；上限为 {size}。",
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
    most = most_reserved(readings)
    if most is None:
        return []
    spare = held_back(most)
    return [
        text(
            f"The allocator had reserved at most {human_bytes(most['reserved'])}, of which {human_bytes(spare)} "
            f"({spare / most['reserved']:.1%}) were not allocated then: kept for reuse, or in pieces too small to be of use.",
            f"分配器最多保留（reserved）{human_bytes(most['reserved'])}，其中 {human_bytes(spare)}（{spare / most['reserved']:.1%}）"
            "当时未分配：留待复用，或是碎片。",
        )
    ]
