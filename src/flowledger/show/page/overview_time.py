"""Where the time goes: the stages of the step in the middle and of the last whole one."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowledger.flow.stages import order
from flowledger.show.page.book import Book, Text, text
from flowledger.show.page.overview_charts import TIMES, time_spec, unit_of
from flowledger.show.words import human_seconds

Data = dict[str, Any]

WHICH = {"middle": ("middle", "居中"), "last": ("last", "最后")}
BETWEEN, WAITING = text("between stages", "阶段之间"), text(", waiting for others", "，等待其他 rank")
NO_STEPS = text(
    "No step was timed in this run: where its time goes is not known.", "本次运行没有计时的步：不知道时间花在哪里。"
)


def time_of(book: Book) -> Data:
    """The stages of the step in the middle and of the last whole one: `rows` for the table, `bars` for the chart."""
    stages = book.seen("FROM stages")
    if not stages:
        return _told_times(book)
    cut = {row["step"] for row in book.ledger.rows("FROM cut_steps")}
    whole = {row["step"]: row["seconds"] for row in book.seen("FROM step_seconds")}
    steps = [step for step in sorted(whole) if step not in cut and whole[step] is not None] or sorted(whole)
    chosen = _middle_and_last(steps, whole)
    rows = [
        {
            "which": which, "step": step, "stage": row["stage"], "seconds": row["seconds"], "share": row["share"],
            "waited_seconds": row["waited_seconds"], "slowest_rank": row["slowest_rank"],
        }
        for which, step in chosen.items()
        for row in stages
        if row["step"] == step and row["seconds"] is not None
    ]  # fmt: skip
    return _timed(rows, {which: whole[step] for which, step in chosen.items()})


def _told_times(book: Book) -> Data:
    """What a log says of its stages, where no span was recorded."""
    prefix = "stage_time_s/"
    told = {
        metric.name.removeprefix(prefix): metric.values for metric in book.metrics if metric.name.startswith(prefix)
    }
    whole = next((metric.values for metric in book.metrics if metric.name == "step_time_s"), {})
    steps = sorted({step for values in told.values() for step in values})
    if not steps:
        return {"missing": [] if book.ledger.directory.manifest.level == "plan" else [NO_STEPS]}
    totals = {step: whole.get(step) or sum(values.get(step, 0.0) for values in told.values()) for step in steps}
    chosen = _middle_and_last(steps, totals)
    rows = [
        {"which": which, "step": step, "stage": stage, "seconds": values[step], "share": values[step] / totals[step] if totals[step] else None,
         "waited_seconds": None, "slowest_rank": None}
        for which, step in chosen.items() for stage, values in told.items() if step in values
    ]  # fmt: skip
    return _timed(rows, {which: totals[step] for which, step in chosen.items()})


def _position(stage: str) -> tuple[int, str]:
    return (order().index(stage) if stage in order() else len(order())), stage


def _middle_and_last(steps: Sequence[int], seconds: Mapping[int, float]) -> dict[str, int]:
    """The step in the middle of all by time, and the last; one where they are the same."""
    if not steps:
        return {}
    middle = sorted(steps, key=lambda step: (seconds[step], step))[(len(steps) - 1) // 2]
    return {"last": steps[-1]} if middle == steps[-1] else {"middle": middle, "last": steps[-1]}


def _timed(rows: list[Data], whole: Mapping[str, float]) -> Data:
    bars = []
    for row in rows:
        waited = min(row["waited_seconds"] or 0.0, row["seconds"])
        parts = (("own", row["seconds"] - waited), ("waiting", waited))
        bars += [{**_bar(row), "part": part, "seconds": spent} for part, spent in parts if spent > 0]
    for which, seconds in whole.items():
        mine = [row for row in rows if row["which"] == which]
        if mine and (rest := seconds - sum(row["seconds"] for row in mine)) > 0:
            bars.append({**_bar(mine[0]), "stage": "between", "part": "own", "seconds": rest})
    unit, size = unit_of(max(whole.values(), default=0.0), TIMES)
    for at, bar in enumerate(bars):
        bar |= {"at": at, "amount": bar["seconds"] / size, **_told_time(bar)}
    stages = list(dict.fromkeys(bar["stage"] for bar in bars))
    return {"rows": rows, "bars": bars, "whole": dict(whole), "charts": {"time": time_spec(stages, unit, len(whole))}, "missing": [] if rows else [NO_STEPS]}  # fmt: skip


def _told_time(bar: Mapping[str, Any]) -> dict[str, Text]:
    """What stands beside a bar, and what is said of one part of it."""
    english, chinese = WHICH[bar["which"]]
    stage = BETWEEN if bar["stage"] == "between" else text(bar["stage"], bar["stage"])
    more = WAITING if bar["part"] == "waiting" else text("", "")
    took = human_seconds(bar["seconds"])
    return {
        "bar": text(f"{english} (step {bar['step']})", f"{chinese}（第 {bar['step']} 步）"),
        "told": text(f"{stage['en']}{more['en']}: {took}", f"{stage['zh']}{more['zh']}：{took}"),
    }


def _bar(row: Mapping[str, Any]) -> Data:
    return {"which": row["which"], "step": row["step"], "stage": row["stage"]}
