"""Signals: metrics over the steps with healthy ranges and alarms, where each rank's time went, and how lengths and rewards are spread."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flowledger.show.page import signals_charts, signals_spread, signals_time
from flowledger.show.page.book import Book, Metric, Text, text
from flowledger.show.page.choice import Choice
from flowledger.tables.metrics import lies_within

Row = dict[str, Any]

# What one looks at first, whatever the run.
FIRST = (
    "reward/mean", "ref_kl", "policy_kl", "kl_loss", "entropy", "grad_norm", "clip_ratio", "policy_loss", "rollout_gap/mean", "response_length/mean",
    "truncation_ratio", "response_limit_ratio", "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu",
)  # fmt: skip
GROUPS = ("first", "e2e", "stage", "tensor", "parallel", "stability", "data", "other")
TIMELINES = 4  # steps whose time is shown
WORD = re.compile(r"[\w./-]+")

NOTHING = text(
    "There are no signals: no metric, no timed stage and no sample was recorded. A plan has none; record a run, or import its log.",
    "没有信号：没有记录任何指标、阶段耗时或样本。计划没有信号；请记录一次运行，或导入其日志。",
)
NO_METRICS = text("No metric has a number.", "没有任何指标有数值。")


def choices(book: Book) -> Sequence[Choice]:
    """All steps together: the metrics are the same whichever is looked at."""
    return [Choice()]


def data(book: Book, at: Choice) -> dict[str, Any]:
    """Metrics over the steps, alarms, timelines of a few steps, distributions of all. Of a step that is asked for: its timeline alone."""
    if at.step is not None:
        return {"timelines": signals_time.timelines(book, [at.step])}
    steps = sorted({step for metric in book.metrics for step in metric.values})
    alarms = [*fired(book)]
    timelines = signals_time.timelines(book, _steps(book, steps))
    spread = signals_spread.distributions(book)
    if not (steps or timelines or spread):
        return {"absent": True, "missing": [NOTHING]}
    return {
        "steps": steps, "metrics": _ordered(_row(metric, steps) for metric in book.metrics if metric.values),
        "alarms": alarms, "timelines": timelines, "distributions": spread,
        "charts": signals_charts.charts(sorted({*steps, *(step for one in spread for step in one["steps"])})), "missing": _missing(steps, timelines, spread),
    }  # fmt: skip


def _missing(steps: Sequence[int], timelines: Sequence[Row], spread: Sequence[Row]) -> list[Text]:
    return [
        *([] if steps else [NO_METRICS]),
        *([] if timelines else [signals_time.NOTHING]),
        *([] if spread else [signals_spread.NOTHING]),
    ]


def _row(metric: Metric, steps: Sequence[int]) -> Row:
    """A metric's numbers in the order of `steps`; `special`: those that are none (nan, inf), by the position of their step."""
    values = [metric.values.get(step) for step in steps]
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    special = {at: str(value) for at, value in enumerate(values) if value is not None and not math.isfinite(value)}
    return {
        "name": metric.name, "unit": metric.unit, "level": metric.level, "means": metric.means,
        "healthy": _range(metric), "shade": shade(metric.healthy, [value for value in finite if value is not None]),
        "outside": is_outside(metric), "recomputed": metric.recomputed, "values": finite, "special": special,
        "group": "first" if metric.name in FIRST else metric.level or "other",
    }  # fmt: skip


def is_healthy(metric: Metric, value: float) -> bool:
    """Whether a number lies within the range that is healthy, where there is one. What is no number lies in none."""
    return metric.healthy is None or lies_within(metric.healthy, value)


def is_outside(metric: Metric) -> bool:
    """Whether the last number is not healthy: what the overview counts and signals unfold."""
    return bool(metric.values) and not is_healthy(metric, metric.values[max(metric.values)])


def _range(metric: Metric) -> list[float | None] | None:
    """Low and high; None for a side that is open."""
    if metric.healthy is None:
        return None
    return [bound if bound is not None and math.isfinite(bound) else None for bound in metric.healthy]


def shade(healthy: tuple[float | None, float | None] | None, values: Sequence[float]) -> list[float] | None:
    """What of the healthy range is seen beside the numbers: they fill the chart, and the bound that they have left stays in sight."""
    if healthy is None or not values:
        return None
    low, high = (bound if bound is not None else way * math.inf for way, bound in zip((-1, 1), healthy, strict=True))
    least, most = min(values), max(values)
    if high < least:
        least = high
    if low > most:
        most = low
    room = abs(most) * 0.1 or 1.0 if signals_charts.is_flat([least, most]) else (most - least) * 0.08
    return [max(low, least - room), min(high, most + room)]


def _ordered(rows: Iterable[Row]) -> list[Row]:
    """The well-known ones in their order, then group by group by name."""
    place = {name: at for at, name in enumerate(FIRST)}
    return sorted(rows, key=lambda row: (GROUPS.index(row["group"]), place.get(row["name"], len(FIRST)), row["name"]))


def fired(book: Book) -> Iterable[Row]:
    """Alarms that fired: at which step, what they say, and the metrics that their evidence names."""
    names = {metric.name for metric in book.metrics}
    for found in book.findings:
        if found["order"] == "alarms" and found["verdict"] in ("warn", "fail"):
            kept = {
                name: found.get(name)
                for name in ("id", "verdict", "step", "stage", "rank", "message", "next_step", "evidence")
            }
            told = (line.partition(" = ")[0] for line in found["evidence"] or () if " = " in line)
            said = {word for line in told for word in WORD.findall(line)}
            yield {**kept, "zh": found.get("zh") or {}, "metrics": sorted(said & names)}


def _steps(book: Book, steps: Sequence[int]) -> list[int]:
    """The steps whose time is shown: the longest, the first, one that is as long as most, the last; all of a short run."""
    times: Mapping[int, float] = next((one.values for one in book.metrics if one.name == "step_time_s"), {})
    timed = sorted(step for step, value in times.items() if math.isfinite(value))
    if not timed:
        spans = signals_time.steps(book)
        return [*dict.fromkeys([*spans[:1], *spans[-1:]])]
    by_time = sorted(timed, key=lambda step: times[step])
    chosen = [by_time[-1], timed[0], by_time[len(by_time) // 2], timed[-1]]
    return [*dict.fromkeys([*chosen, *timed] if len(timed) <= TIMELINES else chosen)]
