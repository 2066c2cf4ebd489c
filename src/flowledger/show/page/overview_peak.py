"""Where the memory goes: the highest peak that was recorded and the highest that was planned, each taken apart by kind."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowledger.flow.kinds import KINDS
from flowledger.show.page.book import Book, Text, text
from flowledger.show.page.overview_charts import SIZES, memory_spec, unit_of
from flowledger.show.words import human_bytes

Data = dict[str, Any]

SIDES = {"recorded": text("recorded", "记录"), "planned": text("planned", "计划")}
NO_KINDS = text(
    "No operators were watched in this run: what the peak is made of is not known (record.level = tensors, record.ops_every).",
    "本次运行没有监视算子：不知道峰值由什么构成（record.level = tensors，record.ops_every）。",
)
NO_MEMORY = text("No memory was recorded or planned.", "没有记录或计划显存。")


def memory_of(book: Book) -> Data:
    """The highest peak that was recorded and the highest that was planned, each taken apart by kind."""
    sides = {"recorded": _highest(book.seen("FROM peaks")), "planned": _highest(book.expected("FROM peaks"))}
    peaks = {which: _peak(row) for which, row in sides.items() if row is not None}
    if not peaks:
        return {"peaks": {}, "missing": [NO_MEMORY]}
    bars = [
        {"which": which, "kind": kind, "bytes": size}
        for which, peak in peaks.items()
        for kind, size in (peak["kinds"] or {"unknown": peak["peak"]}).items()
        if size
    ]
    limit = max((peak["limit"] for peak in peaks.values() if peak["limit"]), default=None)
    unit, one = unit_of(limit or max(peak["peak"] for peak in peaks.values()), SIZES)
    for at, bar in enumerate(bars):
        bar |= {"at": at, "amount": bar["bytes"] / one, "bar": SIDES[bar["which"]], "told": _told_memory(bar)}
    kinds = [kind for kind in (*KINDS, "unknown") if any(bar["kind"] == kind for bar in bars)]
    lacks = "recorded" in peaks and peaks["recorded"]["kinds"] is None
    return {
        "peaks": peaks, "bars": bars, "limit": limit, "allocator": _allocator(book),
        "charts": {"memory": memory_spec(kinds, unit, len(peaks), limit and limit / one)},
        "means": {kind: text(*KINDS[kind]) for kind in kinds if kind in KINDS},
        "missing": [NO_KINDS] if lacks else [],
    }  # fmt: skip


def _told_memory(bar: Mapping[str, Any]) -> Text:
    english, chinese = KINDS.get(bar["kind"], ("not taken apart", "未拆分"))
    size = f"{human_bytes(bar['bytes'])}B"
    return text(f"{bar['kind']}, {english}: {size}", f"{bar['kind']}，{chinese}：{size}")


def _highest(peaks: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The one of which most is known, as `show RUN memory` has it: live tensors where they were watched, else the allocator."""
    return max(peaks, key=lambda row: (row["instant"] == "peak", row["peak"], row["known"] is not None), default=None)


def _peak(row: Mapping[str, Any]) -> Data:
    kinds = {kind: row[kind] for kind in KINDS if row[kind] is not None}
    place = {
        name: row[name]
        for name in ("step", "stage", "phase", "rank", "instant", "limit", "allocated", "reserved", "peak")
    }
    return {**place, "kinds": {kind: max(size, 0) for kind, size in kinds.items()} if row["known"] is not None else None}  # fmt: skip


def _allocator(book: Book) -> Data | None:
    """The fullest reading of the allocator: beside live tensors it counts what they leave unexplained."""
    rows = book.seen(
        "SELECT source, stage, phase, step, rank, allocated, reserved FROM memory_readings WHERE allocated IS NOT NULL AND source <> 'plan' "
        "ORDER BY allocated DESC, t_ns, process, stage, phase, instant LIMIT 1"
    )
    return rows[0] if rows else None
