"""Memory: what fills it over the instants of a step, on a rank; where the peak is and of what it is made; how ranks differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowledger.flow.stages import stages
from flowledger.show.estimates import estimates
from flowledger.show.page import (
    memory_charts,
    memory_choice,
    memory_course,
    memory_peak,
    memory_ranks,
    memory_stage_charts,
)
from flowledger.show.page.book import Book, Rows, Text, text
from flowledger.show.page.choice import Choice
from flowledger.show.page.memory_course import NAMES, TELLING
from flowledger.show.page.once import asking_once
from flowledger.show.page.packed import packed
from flowledger.show.shortage import shortages

Row = Mapping[str, Any]

NOTHING = text(
    "Memory was neither recorded nor planned: a run of flowledger records it by itself, a plan works it out "
    "(flowledger plan CONFIG -o PLAN), a log tells it where an allocator's report stands in it.",
    "既没有记录也没有计划显存：flowledger 的运行会自动记录，计划会推算（flowledger plan CONFIG -o PLAN），日志仅在含分配器报告时才有。",
)
NOT_WATCHED = text(
    "No operator was watched in this step: kinds are known only where stages end, or not at all. Choose a watched step "
    "(record.ops_every says which are).",
    "此步没有逐算子观察：仅在阶段结束处知道各类显存，或完全不知道。请选择被观察的步（由 record.ops_every 决定）。",
)
NEVER_WATCHED = text(
    "No operator was watched in this run: kinds are known only where stages end, or not at all. record.ops_every watches some steps, "
    "from record.level=tensors on.",
    "此次运行没有逐算子观察：仅在阶段结束处知道各类显存，或完全不知道。record.ops_every 会观察部分步（record.level=tensors 及以上）。",
)
THINNED = text(
    "This step has {count} readings; drawn are the fullest of each stage and instant.",
    "此步有 {count} 个读数；图中只画每个阶段与时刻中最高的。",
)


def choices(book: Book) -> Sequence[Choice]:
    """Steps and ranks worth a look: watched steps with the highest peak, and the ends; a rank of each class, and the extremes."""
    book = asking_once(book)
    among = memory_choice.among(book)
    peaks = among.peaks
    held = {(row["step"], row["rank"]) for row in peaks}
    wanted = ((step, rank) for step in among.steps for rank in among.ranks)
    found = [Choice(step=step, rank=rank) for step, rank in wanted if (step, rank) in held]
    return found or ([Choice()] if not peaks else [Choice(step=peaks[0]["step"], rank=peaks[0]["rank"])])


def data(book: Book, at: Choice) -> dict[str, Any]:
    """The readings of a step on a rank, process by process, and what is said of them; what was planned for it beside."""
    book = asking_once(book)
    among = memory_choice.among(book)
    peaks = among.peaks
    if not peaks:
        return {"absent": True, "missing": [NOTHING]}
    step, rank = memory_choice.asked(book, peaks, at)
    shown = _of(book, "memory_readings", among, step, rank)
    if not shown:
        return {"absent": True, "missing": [_nothing_at(step, rank)]}
    planned = {} if shown[0]["source"] == "plan" else memory_ranks.planned(book, step, rank)
    listed = _of(book, "memory_by_stage", among, step, rank)
    tops = {row["process"]: row for row in peaks if (row["step"], row["rank"]) == (step, rank)}
    watched = any(row["instant"] == "peak" for row in peaks)
    batches = {
        name: [row for row in _batches(book, among.steps, step) if row["process"] == name]
        for name in _names(shown, tops)
    }
    processes = [
        _process(book, name, shown, listed, tops.get(name), planned, batches[name], watched)
        for name in _names(shown, tops)
    ]
    spread = memory_ranks.spread(book, step)
    return {
        "step": step, "rank": rank, "source": shown[0]["source"],
        "steps": [{"step": one, "watched": memory_choice.is_watched(peaks, one)} for one in among.steps],
        "ranks": [{"rank": one, "why": why, "alike": memory_choice.alike(book, one)} for one, why in among.ranks.items()],
        "processes": processes, "ranks_spread": spread,
        "estimates": _estimates(book, peaks),
        "charts": _rank_charts(spread),
        "missing": [said for process in processes for said in process.pop("missing")],
    }  # fmt: skip


READINGS = "FROM {view} WHERE list_contains(?::BIGINT[], coalesce(step, -1)) AND list_contains(?::BIGINT[], coalesce(rank, -1))"


def _of(book: Book, view: str, among: memory_choice.Among, step: int | None, rank: int | None) -> Rows:
    """Rows of a step on a rank. Those of the choices are read together."""
    steps, ranks = among.steps, [*among.ranks]
    held = step in steps and rank in ranks
    rows = _read(book, view, steps if held else [step], ranks if held else [rank])
    return [row for row in rows if row["step"] == step and row["rank"] == rank]


def _read(book: Book, view: str, steps: Sequence[int | None], ranks: Sequence[int | None]) -> Rows:
    listed = [[-1 if one is None else one for one in some] for some in (steps, ranks)]
    return book.shown(READINGS.format(view=view), listed)


def _names(readings: Rows, tops: Mapping[str, Row]) -> list[str]:
    """The processes of a rank, that with the highest peak first."""
    names = sorted({row["process"] for row in readings})
    return sorted(names, key=lambda name: -memory_choice.size(tops[name]) if name in tops else 0)


def _process(
    book: Book,
    name: str,
    readings: Rows,
    listed: Rows,
    peak: Row | None,
    planned: Mapping[str, memory_ranks.Planned],
    batches: Rows,
    any_watched: bool,
) -> dict[str, Any]:
    readings, listed = ([row for row in some if row["process"] == name] for some in (readings, listed))
    rows = memory_course.course(readings, listed)
    rows = memory_course.with_plan(rows, {stage: one["bytes"] for stage, one in planned.items()})
    peak = peak or memory_peak.of(rows)
    rows = memory_course.with_peak(rows, peak)
    beside = memory_ranks.beside(rows, planned)
    tokens = memory_ranks.by_tokens(batches, rows)
    told = memory_course.told(rows)
    hidden = memory_course.is_hidden_by_residue(rows)
    return {
        "process": name,
        "readings": packed(rows, NAMES),
        "hides": hidden,
        "peak": _peak(book, peak, rows),
        "stages": beside, "tokens": tokens,
        "charts": _charts(rows, told, beside, tokens, hidden=hidden),
        "missing": _missing(rows, readings, any_watched=any_watched),
    }  # fmt: skip


def _peak(book: Book, peak: Row | None, rows: Rows) -> dict[str, Any] | None:
    if peak is None or peak["peak"] is None:
        return None
    largest = memory_peak.tensors(book.ledger, peak, memory_choice.tops(book))
    return {
        "bytes": peak["peak"], "place": {name: peak[name] for name in memory_peak.PLACE},
        "says": memory_peak.sentences(peak, rows, shortages(book.ledger, peak["step"])), "parts": memory_peak.parts(peak),
        "tensors": largest, "pool": memory_peak.pool(peak, largest),
    }  # fmt: skip


def _missing(rows: Rows, readings: Rows, *, any_watched: bool) -> list[Text]:
    found = []
    if rows[0]["source"] == "record" and not any(row["instant"] == "peak" for row in rows):
        found.append(NOT_WATCHED if any_watched else NEVER_WATCHED)
    if len(rows) < len(readings):
        found.append(text(*(THINNED[lang].format(count=len(readings)) for lang in ("en", "zh"))))
    return found


def _charts(rows: Rows, told: Sequence[str], beside: Rows, tokens: Rows, *, hidden: bool) -> dict[str, Any]:
    """Specifications of what there is to draw. Where residue hides the rest there is a chart without it and one with it."""
    charts: dict[str, Any] = {}
    limit = max((row["limit"] or 0 for row in rows), default=0) or None
    for name in ("kinds", "residue") if hidden else ("kinds",):
        drawn = memory_course.drawn(rows, name, hides=hidden)
        kinds = [one for one in told if not hidden or name == "residue" or one not in ("residue", "untold")]
        if drawn and kinds:
            most = max(sum(max(row.get(kind) or 0, 0) for kind in kinds) for row in drawn)
            charts[name] = memory_charts.by_kind(
                kinds, instants=len(drawn), most=max(most, *(row["planned"] or 0 for row in drawn)), limit=limit,
                planned=any(row["planned"] is not None for row in drawn),
                peak_at=next((row["at"] for row in drawn if row.get("peak") is not None), None),
            )  # fmt: skip
    asked = [row for row in rows if row["allocated"] is not None or row["device_used"] is not None]
    if series := [name for name in memory_charts.LINES if any(row[name] is not None for row in asked)]:
        most = max(row[name] or 0 for row in asked for name in series)
        charts["allocator"] = memory_charts.allocator(series, instants=len(rows), most=most, limit=limit)
    if {row["source"] for row in beside} == {"plan", "run"}:
        kinds = [kind for kind in (*TELLING, "residue", "untold") if any(row.get(kind) for row in beside)]
        charts["stages"] = memory_stage_charts.by_stage(
            kinds, most=max(row["whole"] for row in beside), stages=[*stages()]
        )
    if tokens:
        charts["tokens"] = memory_stage_charts.by_tokens(most=max(row["bytes"] for row in tokens))
    return charts


def _rank_charts(spread: Rows) -> dict[str, Any]:
    if len({row["rank"] for row in spread}) < 2:
        return {}
    there = {row["stage"] for row in spread}
    ordered = [*(stage for stage in stages() if stage in there), *sorted(there - stages().keys())]
    return {"ranks": memory_stage_charts.over_ranks(most=max(row["bytes"] for row in spread), stages=ordered)}


def _batches(book: Book, steps: Sequence[int | None], step: int | None) -> Rows:
    """The tokens of the step's micro-batches. Those of the choices are read together."""
    if step in steps:
        return [row for row in memory_ranks.micro_batches(book, steps) if row["step"] == step]
    return memory_ranks.micro_batches(book, [step])


def _estimates(book: Book, peaks: Rows) -> Rows:
    """The rough estimates beside what was measured in the run; none of a plan, which knows better."""
    recorded = [row for row in peaks if row["source"] != "plan" and row["peak"]]
    if not recorded:
        return []
    highest = max(recorded, key=lambda row: (row["instant"] == "peak", row["peak"], row["known"] is not None))
    return estimates(book.ledger, highest)


def _nothing_at(step: int | None, rank: int | None) -> Text:
    at = " and ".join(f"{name} {value}" for name, value in (("step", step), ("rank", rank)) if value is not None)
    return text(
        f"No memory is known of {at or 'this run'}.", f"没有 {at.replace(' and ', '、') or '本次运行'} 的显存数据。"
    )
