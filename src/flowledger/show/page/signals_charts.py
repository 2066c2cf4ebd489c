"""The charts of signals, as Vega-Lite specifications: a metric over steps, the timeline of a step, a distribution.

Rows come apart from them. Layers have names: who has no rows for one leaves it out.
"""

from collections.abc import Sequence
from typing import Any

from flowledger.flow.stages import stages
from flowledger.show.page.book import text
from flowledger.show.page.memory_charts import SCHEMA

Spec = dict[str, Any]

STEP = text("step", "步")
STEPS: Spec = {"tickCount": 5, "grid": False, "labelExpr": "datum.value % 1 ? '' : format(datum.value, ',d')"}
NUMBERS: Spec = {
    "tickCount": 4,
    "labelExpr": "datum.value === 0 ? '0' : abs(datum.value) < 1e-3 ? format(datum.value, '.2~e') : abs(datum.value) >= 1e5 ? format(datum.value, '.3~s') : datum.label",
}  # fmt: skip
FEW = 8  # steps that an axis has room to name one by one
ROW = 30  # height of a rank's row


def charts(steps: Sequence[int]) -> dict[str, Spec]:
    """All of them by name; those over steps have the same axis, so that what lies below one another belongs together."""
    ends = (steps[0], steps[-1]) if len(steps) > 1 else (steps[0] - 1, steps[0] + 1) if steps else (0, 1)
    few = steps if len(steps) <= FEW else None
    return {
        "metric": metric(ends, few), "timeline": timeline(), "histogram": histogram(), "quantiles": quantiles(ends, few),
    }  # fmt: skip


def _over(ends: tuple[int, int], few: Sequence[int] | None) -> Spec:
    """The axis of steps; of few every one is named, and no other."""
    axis = STEPS if few is None else {**STEPS, "values": list(few)}
    scale = {"domain": [*ends], "nice": False}
    return {"field": "step", "type": "quantitative", "title": STEP, "scale": scale, "axis": axis}


def metric(ends: tuple[int, int], few: Sequence[int] | None = None) -> Spec:
    """A metric over the steps. Rows by `kind`: value (null where it is nan or inf, so that the line breaks), point, healthy, special, alarm, chosen;
    room, above and below where all values are one."""
    x = _over(ends, few)
    y: Spec = {"type": "quantitative", "title": None, "scale": {"zero": False}, "axis": NUMBERS}
    tip = [{"field": "step", "title": STEP}, {"field": "written", "title": text("value", "值")}]
    return {
        "$schema": SCHEMA, "width": "container", "height": 120,
        "layer": [
            _layer("healthy", {"type": "rect", "color": "var(--pass)", "opacity": 0.12}, {"y": {**y, "field": "low"}, "y2": {"field": "high"}}),
            _layer("alarm", {"type": "rule", "strokeWidth": 1.5, "strokeDash": [3, 2]}, {"x": x, "color": _verdict(), "tooltip": _alarm()}),
            _layer("chosen", {"type": "rule", "strokeWidth": 1, "color": "var(--soft)"}, {"x": x}),
            _layer("value", {"type": "line", "strokeWidth": 1.6, "color": "var(--accent)", "invalid": "break-paths-show-domains"}, {"x": x, "y": {**y, "field": "value"}}),
            _layer("point", {"type": "circle", "color": "var(--accent)", "opacity": 1}, {"x": x, "y": {**y, "field": "value"}, "size": _if("datum.seen", 22, 40), "opacity": _if("datum.seen", 1, 0), "tooltip": tip}),
            _layer("room", {"type": "point", "opacity": 0}, {"y": {**y, "field": "value"}}),
            _layer("special", {"type": "text", "baseline": "top", "fontWeight": 700, "fontSize": 10, "color": "var(--fail)"}, {"x": x, "y": {"value": 1}, "text": {"field": "written"}, "tooltip": tip}),
            _layer("alarm-mark", {"type": "point", "filled": True, "shape": "triangle-down", "size": 60, "opacity": 1}, {"x": x, "y": {"value": 0}, "color": _verdict(), "tooltip": _alarm()}),
        ],
    }  # fmt: skip


def timeline() -> Spec:
    """What each rank did when. Rows by `kind`: stage, wait, comm; `label` names the stages over the first row. Heights are for `rows` ranks."""
    y: Spec = {
        "field": "name",
        "type": "nominal",
        "sort": None,
        "title": None,
        "axis": {"ticks": False, "domain": False, "labelPadding": 8},
    }
    x: Spec = {
        "field": "begin",
        "type": "quantitative",
        "title": text("ms since the step began", "本步开始后的 ms"),
        "scale": {"nice": False},
        "axis": {"grid": False, "tickCount": 12},
    }
    span: Spec = {"x": x, "x2": {"field": "end"}, "y": y}
    edge = {
        "stroke": _if("datum.open", "var(--fail)", "var(--paper)"), "strokeDash": _if("datum.open", [4, 3], [1, 0]), "strokeWidth": _if("datum.open", 2, 0.5),
    }  # fmt: skip
    names = [*stages()]
    stage: Spec = {
        "field": "stage", "type": "nominal", "legend": None,
        "scale": {"domain": [*names, "other"], "range": [*(f"var(--stage-{name})" for name in names), "var(--soft)"]},
    }  # fmt: skip
    tip = [
        {"field": "name", "title": "rank"}, {"field": "told", "title": text("stage", "阶段")}, {"field": "took", "title": text("took", "耗时")},
        {"field": "comm", "title": text("in collectives", "集合通信")}, {"field": "waited", "title": text("of that waiting", "其中等待")},
    ]  # fmt: skip
    return {
        "$schema": SCHEMA, "width": "container", "height": ROW,
        "layer": [
            _layer("stage", {"type": "bar", "size": ROW - 8, "cursor": "pointer"}, {**span, "color": stage, **edge, "opacity": _if("datum.dim", 0.25, 1), "tooltip": tip}),
            _layer("wait", {"type": "bar", "size": ROW - 9, "color": "var(--paper)", "opacity": 0.6, "tooltip": None}, span),
            _layer("comm", {"type": "bar", "size": 5, "color": "var(--ink)", "yOffset": (ROW - 8) / 2 - 2.5, "tooltip": None}, span),
            _layer("label", {"type": "text", "angle": -32, "align": "left", "baseline": "bottom", "fontSize": 11, "color": "var(--soft)"}, {"x": {**x, "field": "middle"}, "y": {"value": -3}, "text": {"field": "told"}}),
        ],
    }  # fmt: skip


def histogram() -> Spec:
    """Shares of a step between fixed edges, those of the whole run behind them. Rows by `kind`: run, step."""
    x: Spec = {
        "field": "begin",
        "type": "quantitative",
        "bin": "binned",
        "title": None,
        "axis": {**NUMBERS, "tickCount": 6, "grid": False},
    }
    y: Spec = {
        "field": "share",
        "type": "quantitative",
        "title": None,
        "axis": {"format": "%", "tickCount": 4},
        "stack": None,
    }
    tip = [
        {"field": "between", "title": text("between", "区间")}, {"field": "count", "title": text("count", "个数")},
        {"field": "share", "title": text("share", "占比"), "format": ".1%"}, {"field": "whole", "title": text("share of the run", "全程占比"), "format": ".1%"},
    ]  # fmt: skip
    bar: Spec = {"x": x, "x2": {"field": "end"}, "y": y}
    return {
        "$schema": SCHEMA, "width": "container", "height": 130,
        "layer": [
            _layer("run", {"type": "bar", "color": "var(--line)", "binSpacing": 0}, bar),
            _layer("step", {"type": "bar", "color": "var(--accent)", "opacity": 0.75, "binSpacing": 1}, {**bar, "tooltip": tip}),
        ],
    }  # fmt: skip


def quantiles(ends: tuple[int, int], few: Sequence[int] | None = None) -> Spec:
    """The same over the steps: what four fifths of it lie between, and the median. Rows by `kind`: quantiles, chosen."""
    x = _over(ends, few)
    y: Spec = {"type": "quantitative", "title": None, "scale": {"zero": False}, "axis": NUMBERS}
    tip = [
        {"field": "step", "title": STEP},
        *({"field": name, "title": name, "format": ".4~g"} for name in ("p10", "p50", "p90")),
    ]
    return {
        "$schema": SCHEMA, "width": "container", "height": 110,
        "layer": [
            _layer("quantiles-range", {"type": "area", "color": "var(--accent)", "opacity": 0.2}, {"x": x, "y": {**y, "field": "p10"}, "y2": {"field": "p90"}}),
            _layer("quantiles-median", {"type": "line", "color": "var(--accent)", "strokeWidth": 1.6}, {"x": x, "y": {**y, "field": "p50"}}),
            _layer("chosen", {"type": "rule", "strokeWidth": 1, "color": "var(--ink)"}, {"x": x}),
            _layer("quantiles-points", {"type": "circle", "color": "var(--accent)", "size": 40, "cursor": "pointer"}, {"x": x, "y": {**y, "field": "p50"}, "opacity": {"value": 0}, "tooltip": tip}),
        ],
    }  # fmt: skip


def is_flat(values: Sequence[float]) -> bool:
    """Whether numbers are one but for rounding: an axis of one number has no other."""
    least, most = min(values), max(values)
    return most - least <= 1e-9 * max(abs(least), abs(most))


def drawn(spec: Spec, rows: list[dict[str, Any]]) -> Spec:
    """The specification without layers that have no rows: the same as `theme.js` leaves out in a page."""
    there = {row["kind"] for row in rows}
    return {**spec, "layer": [layer for layer in spec["layer"] if _kind(layer["name"]) in there]}


def _kind(layer: str) -> str:
    """Which rows a layer draws: `alarm-mark` those of alarms."""
    return layer.partition("-")[0]


def _layer(name: str, mark: Spec, encoding: Spec) -> Spec:
    return {
        "name": name,
        "transform": [{"filter": f"datum.kind === '{_kind(name)}'"}],
        "mark": mark,
        "encoding": encoding,
    }


def _verdict() -> Spec:
    return _if("datum.verdict === 'fail'", "var(--fail)", "var(--warn)")


def _if(test: str, value: Any, otherwise: Any) -> Spec:
    return {"condition": {"test": test, "value": value}, "value": otherwise}


def _alarm() -> list[Spec]:
    return [
        {"field": "step", "title": STEP},
        {"field": "id", "title": text("alarm", "告警")},
        {"field": "message", "title": text("says", "内容")},
    ]
