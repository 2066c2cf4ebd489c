"""The figures that an overview leads with, each with its course over the steps, and the recorder's own cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from flowledger.show.page.book import Book, Metric, Text, text
from flowledger.show.page.signals import is_healthy
from flowledger.show.words import human_bytes, human_count

POINTS = 120  # of a course: more cannot be told apart in so small a drawing

Course = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Figure:
    """`names`: the metrics that may stand there, the best first. `pick`: median, last, most, or ends (first and last)."""

    key: str
    title: Text
    names: tuple[str, ...]
    pick: str
    form: str


FIGURES = (
    Figure("step_time", text("Step time, median of the steps", "步耗时（各步中位数）"), ("step_time_s",), "median", "seconds"),
    Figure("tokens_per_s", text("Tokens/s, median of the steps", "token/s（各步中位数）"), ("tokens_per_s", "tokens_per_s_per_gpu"), "median", "count"),
    Figure("reward", text("Reward, last", "reward，末步"), ("reward/mean",), "ends", "number"),
    Figure("kl", text("KL, last", "KL，末步"), ("ref_kl", "ref_kl/k3", "ref_kl/k1", "policy_kl", "policy_kl/k3", "kl_loss"), "last", "number"),
    Figure("grad_norm", text("Gradient norm, last", "梯度范数，末步"), ("grad_norm",), "last", "number"),
    Figure("entropy", text("Entropy, last", "熵，末步"), ("entropy",), "last", "number"),
    Figure("memory", text("Peak memory, whole process", "显存/内存峰值（整个进程）"), ("memory/allocated_peak", "memory/reserved_peak"), "most", "bytes"),
    Figure("mfu", text("MFU, median of the steps", "MFU（各步中位数）"), ("mfu",), "median", "percent"),
)  # fmt: skip


def figures(book: Book) -> list[dict[str, Any]]:
    """One row a figure that the run has a number for."""
    known = {metric.name: metric for metric in book.metrics if metric.values}
    found = [
        (figure, next((known[name] for name in figure.names if name in known), None)) for figure in FIGURES
    ]  # fmt: skip
    rows = [_row(figure, metric) for figure, metric in found if metric is not None]
    for row in rows:
        if row["key"] == "memory":
            row["note"] = _of_limit(book, row["value"])
    return rows


def _row(figure: Figure, metric: Metric) -> dict[str, Any]:
    course = sorted(metric.values.items())
    value = PICKS[figure.pick]([number for _, number in course])
    return {
        "key": figure.key, "title": figure.title, "metric": metric.name, "unit": metric.unit, "form": figure.form, "value": value,
        "first": course[0][1] if figure.pick == "ends" else None, "means": metric.means, "healthy": metric.healthy,
        "unhealthy": not is_healthy(metric, value), "course": thinned(course), "note": None,
        "link": {"view": "signals", "asked": {"find": metric.name}},
    }  # fmt: skip


PICKS: Mapping[str, Any] = {"median": median, "last": lambda all_: all_[-1], "ends": lambda all_: all_[-1], "most": max}


def thinned(course: Sequence[tuple[int, float]], most: int = POINTS) -> Course:
    """At most so many points of a course, evenly taken; the first and the last are among them."""
    if len(course) <= most:
        return [*course]
    return [course[round(at * (len(course) - 1) / (most - 1))] for at in range(most)]


def _of_limit(book: Book, peak: float) -> Text | None:
    limits = [row["limit"] for row in book.seen('SELECT source, max("limit") AS "limit" FROM memory GROUP BY source')]
    limit = max(filter(None, limits), default=None)
    if limit is None:
        return None
    share, size = f"{peak / limit:.0%}", human_bytes(limit)
    return text(f"{share} of the device's {size}", f"占设备 {size} 的 {share}")


def own_cost(book: Book) -> dict[str, Any] | None:
    """What recording itself cost: events, drops, bytes, µs an event; CPU seconds of all ranks and their share of the ranks' steps."""
    told = book.ledger.directory.manifest.recorder
    last = {
        row["name"]: row["value"]
        for row in book.seen(
            "SELECT source, name, arg_max(value, step) AS value FROM metrics_by_step "
            "WHERE starts_with(name, 'recorder/') AND step IS NOT NULL GROUP BY source, name"
        )
    }
    if not told and not last:
        return None
    counts = {name: told.get(name, _whole(last.get(f"recorder/{name}"))) for name in ("rows", "dropped", "bytes")}
    each = last.get("recorder/ns_per_row")
    shares = _shares(book)
    return {
        **counts, "us_per_event": None if each is None else each / 1e3, "cpu_s": last.get("recorder/cpu_s"),
        "share": shares.get(False), "watched_share": shares.get(True),
    }  # fmt: skip


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and math.isfinite(value) else None


def _shares(book: Book) -> dict[bool, float]:
    """CPU seconds of the recorder beside the time of the steps, of all ranks together: of steps whose operators were watched, and of others."""
    rows = book.ledger.rows(
        "WITH own AS (SELECT source, process, step, value - coalesce(lag(value) OVER (PARTITION BY process ORDER BY step), 0) AS cpu "
        "FROM metrics WHERE name = 'recorder/cpu_s' AND step IS NOT NULL AND source <> 'plan') "
        "SELECT step IN (SELECT step FROM memory WHERE instant = 'peak' AND source <> 'plan') AS watched, sum(cpu) / sum(seconds) AS share "
        "FROM own JOIN step_seconds USING (source, step) GROUP BY watched"
    )
    return {row["watched"]: row["share"] for row in rows if row["share"] is not None}


def said_of_cost(cost: Mapping[str, Any]) -> Text:
    """The same in a sentence."""
    rows = "?" if cost["rows"] is None else human_count(cost["rows"])
    size = "?" if cost["bytes"] is None else f"{human_bytes(cost['bytes'])}B"
    english, chinese = [f"{rows} events, {size}"], [f"{rows} 个事件，{size}"]
    if cost["dropped"] is None:  # where ranks died, nobody knows
        english.append("drops unknown")
        chinese.append("丢弃数未知")
    else:
        english.append(f"{human_count(cost['dropped'])} dropped")
        chinese.append(f"丢弃 {human_count(cost['dropped'])}")
    if cost["us_per_event"] is not None:
        english.append(f"{cost['us_per_event']:.3g} µs an event")
        chinese.append(f"每个事件 {cost['us_per_event']:.3g} µs")
    if cost["share"] is not None:
        english.append(f"{cost['share']:.1%} of a step")
        chinese.append(f"占一步的 {cost['share']:.1%}")
    if cost["watched_share"] is not None:
        english.append(f"{cost['watched_share']:.1%} where operators were watched")
        chinese.append(f"监视算子的步为 {cost['watched_share']:.1%}")
    return text(", ".join(english), "，".join(chinese))
