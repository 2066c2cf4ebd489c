"""The charts of one step's memory, as Vega-Lite specifications: by kind over its instants, and what the allocator says.

Rows come apart from them, one a reading (`memory_course`).
"""

from collections.abc import Sequence
from typing import Any

from flowledger.flow.kinds import KINDS
from flowledger.show.page.book import Text, text
from flowledger.show.words import human_bytes

Spec = dict[str, Any]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
COLOURS = {**{kind: f"var(--{kind})" for kind in KINDS}, "untold": "var(--soft)"}
APART = 24  # pixels between two slanted names of stages that do not touch
FEWEST = 10  # instants that the axis has room for, so that one reading is no wall
UNTOLD = text("not taken apart", "未拆分")
LINES = {
    "allocated": ("var(--accent)", [1, 0]), "reserved": ("var(--warn)", [6, 3]), "device_used": ("var(--soft)", [2, 2]),
    "residue": ("var(--ink)", [8, 2, 2, 2]),
}  # fmt: skip


def unit(most: float) -> tuple[int, str]:
    """The unit in which so many bytes are a number that one reads at a glance."""
    return next(((size, name) for size, name in UNITS if most >= size), (1, "B"))


def writing(field: str, name: str = "written") -> list[Spec]:
    """Transforms that write bytes as all tables do: 523, 4.0K, 118M, 1.2G."""
    power = " + ".join(f"(abs({field}) >= {999.5 * 1024**n})" for n in range(4))
    size = f"({field} / pow(1024, datum.power))"
    form = f"datum.power && abs({size}) < 9.95 ? '.1f' : '.0f'"
    return [
        {"calculate": power, "as": "power"},
        {"calculate": f"format({size}, {form}) + ['', 'K', 'M', 'G', 'T'][datum.power]", "as": name},
    ]


def by_kind(
    kinds: Sequence[str],
    *,
    instants: int,
    most: float,
    planned: bool = False,
    limit: int | None = None,
    peak_at: int | None = None,
) -> Spec:
    """Memory by kind over the instants of a step: stages as bands, the limit, the peak, and what was planned for each stage."""
    size, name = unit(most)
    layers = [_bands(), _stack(kinds, size, name, instants), _stages(instants)]
    if planned:
        layers.append(_planned(size))
    if limit is not None and limit < 4 * most:
        layers += _limit(limit, size)
    if peak_at is not None:
        layers += [_peak(size, on_the_left=peak_at > instants / 2), _above(1.06 * most / size)]
    return {"$schema": SCHEMA, "width": "container", "height": 320, "layer": layers}


def allocator(series: Sequence[str], *, instants: int, most: float, limit: int | None = None) -> Spec:
    """What the allocator says over the same instants: those of `LINES` that it says."""
    size, name = unit(most)
    legend = {"orient": "bottom", "title": None, "symbolType": "stroke", "symbolSize": 300}
    lines: Spec = {
        "transform": [
            PLACE, {"fold": list(series), "as": ["series", "bytes"]}, {"filter": "isValid(datum.bytes)"},
            {"calculate": "datum.at + 0.5", "as": "middle"}, {"calculate": f"datum.bytes / {size}", "as": "size"},
            *writing("datum.bytes"),
        ],
        "mark": {"type": "line", "point": {"size": 24}, "strokeWidth": 1.5},
        "encoding": {
            "x": _x("middle", instants),
            "y": {"field": "size", "type": "quantitative", "scale": {"zero": False}, "title": name},
            "color": {
                "field": "series", "type": "nominal", "legend": legend,
                "scale": {"domain": list(series), "range": [LINES[one][0] for one in series]},
            },
            "strokeDash": {
                "field": "series", "type": "nominal", "legend": legend,
                "scale": {"domain": list(series), "range": [LINES[one][1] for one in series]},
            },
            "tooltip": [field("place", "place"), field("series", "series"), field("written", "bytes")],
        },
    }  # fmt: skip
    near = limit is not None and limit < 1.5 * most
    layers = [_bands(), lines, *(_limit(limit, size) if near and limit is not None else ())]
    return {"$schema": SCHEMA, "width": "container", "height": 150, "layer": layers}


# Where a reading was taken: `update_actor/backward, peak, mini-batch 1`.
_BATCHES = " + ".join(
    f"(isValid(datum.{name}) ? ', {name.replace('_', '-')} ' + datum.{name} : '')"
    for name in ("mini_batch", "micro_batch")
)
PLACE: Spec = {
    "calculate": "(datum.stage ? datum.stage + (datum.phase ? '/' + datum.phase : '') : datum.instant == 'peak' ? 'between stages'"
    " : datum.instant == 'begin' || datum.instant == 'end' ? 'whole step' : '·') "
    f"+ (datum.instant ? ', ' + datum.instant : '') + {_BATCHES}",
    "as": "place",
}

WORDS: dict[str, Text] = {
    english: text(english, chinese)
    for english, chinese in {
        "place": "位置", "instant": "时刻", "kind": "种类", "bytes": "大小", "share": "占比", "series": "曲线", "stage": "阶段",
        "rank": "rank", "ranks": "同类 rank 数", "source": "来源", "tokens": "token 数", "mini-batch": "mini-batch", "micro-batch": "micro-batch",
        "tokens of the micro-batch": "micro-batch 的 token 数",
    }.items()
}  # fmt: skip


def field(name: str, title: str) -> Spec:
    return {"field": name, "title": WORDS[title]}


def _x(field: str, instants: int) -> Spec:
    return {
        "field": field,
        "type": "quantitative",
        "axis": None,
        "scale": {"domain": [0, max(instants, FEWEST)], "nice": False, "zero": False},
    }


def folded(kinds: Sequence[str], size: int) -> list[Spec]:
    """One row a reading and kind."""
    order = f"indexof({list(kinds)!r}, datum.kind)"
    return [
        PLACE, {"fold": list(kinds), "as": ["kind", "bytes"]}, {"filter": "datum.bytes > 0"},
        {"calculate": f"datum.bytes / {size}", "as": "size"}, {"calculate": order, "as": "order"},
        *writing("datum.bytes"),
    ]  # fmt: skip


def colours(kinds: Sequence[str]) -> Spec:
    named = {lang: f"datum.label === 'untold' ? '{UNTOLD[lang]}' : datum.label" for lang in ("en", "zh")}
    return {
        "field": "kind", "type": "nominal", "legend": {"orient": "bottom", "title": None, "columns": 4, "labelExpr": named},
        "scale": {"domain": list(kinds), "range": [COLOURS[kind] for kind in kinds]},
    }  # fmt: skip


# Of a stretch of one stage.
_ENDS: list[Spec] = [{"op": "min", "field": "at", "as": "first"}, {"op": "max", "field": "until", "as": "last"}]


def _bands() -> Spec:
    """The stretch of each stage behind its readings; the chosen one stands out."""
    return {
        "transform": [
            {"calculate": "datum.at + 1", "as": "until"},
            {"aggregate": _ENDS, "groupby": ["band", "stage", "chosen"]},
        ],
        "mark": {"type": "rect", "cursor": "pointer", "fillOpacity": 0.7},
        "encoding": {
            "x": {"field": "first", "type": "quantitative", "axis": None}, "x2": {"field": "last"},
            "color": {
                "condition": [{"test": "datum.chosen", "value": "var(--mark)"}, {"test": "datum.band % 2", "value": "var(--panel)"}],
                "value": "transparent",
            },
        },
    }  # fmt: skip


def _stack(kinds: Sequence[str], size: int, name: str, instants: int) -> Spec:
    return {
        "transform": [*folded(kinds, size), {"calculate": "datum.at + 1", "as": "until"}],
        "mark": {"type": "bar", "stroke": "var(--paper)", "strokeWidth": 0.4, "cursor": "pointer"},
        "encoding": {
            "x": {**_x("at", instants), "bin": "binned"}, "x2": {"field": "until"},
            "y": {"field": "size", "type": "quantitative", "stack": "zero", "title": name},
            "color": colours(kinds), "order": {"field": "order"},
            "tooltip": [field("place", "place"), field("kind", "kind"), field("written", "bytes")],
        },
    }  # fmt: skip


def _planned(size: int) -> Spec:
    """The planned peak of each stage, dashed over its stretch."""
    return {
        "transform": [
            {"filter": "isValid(datum.planned)"}, {"calculate": "datum.at + 1", "as": "until"},
            {"aggregate": [*_ENDS, {"op": "max", "field": "planned", "as": "planned"}], "groupby": ["band", "stage"]},
            {"calculate": f"datum.planned / {size}", "as": "size"}, *writing("datum.planned"),
        ],
        "mark": {"type": "rule", "strokeWidth": 2, "strokeDash": [5, 3], "color": "var(--ink)"},
        "encoding": {
            "x": {"field": "first", "type": "quantitative"}, "x2": {"field": "last"}, "y": {"field": "size", "type": "quantitative"},
            "tooltip": [field("stage", "stage"), {"field": "written", "title": text("planned peak", "计划峰值")}],
        },
    }  # fmt: skip


def _stages(instants: int) -> Spec:
    """The names of the stages. Where two would lie on each other the one of the longer stretch stands."""
    return {
        "transform": [
            {"aggregate": [{"op": "min", "field": "at", "as": "first"}, {"op": "max", "field": "at", "as": "last"}], "groupby": ["band", "stage"]},
            {"calculate": "(datum.first + datum.last + 1) / 2", "as": "middle"},
            {"filter": "isValid(datum.stage)"},
            {"calculate": "datum.last - datum.first", "as": "long"},
            {"calculate": f"datum.middle * width / {max(instants, FEWEST)}", "as": "pixel"},
            {"calculate": f"floor(datum.pixel / {APART})", "as": "room"},
            {"window": [{"op": "row_number", "as": "place"}], "groupby": ["room"], "sort": [{"field": "long", "order": "descending"}]},
            {"filter": "datum.place === 1"},
            {
                "window": [{"op": op, "field": name, "as": f"{op}_{name}"} for op in ("lag", "lead") for name in ("pixel", "long")],
                "sort": [{"field": "pixel"}],
            },
            {"filter": f"!(isValid(datum.lag_pixel) && datum.pixel - datum.lag_pixel < {APART} && datum.long <= datum.lag_long)"},
            {"filter": f"!(isValid(datum.lead_pixel) && datum.lead_pixel - datum.pixel < {APART} && datum.long < datum.lead_long)"},
        ],
        "mark": {"type": "text", "angle": -32, "align": "left", "baseline": "bottom", "fontSize": 11, "color": "var(--soft)"},
        "encoding": {"x": {"field": "middle", "type": "quantitative"}, "y": {"value": -3}, "text": {"field": "stage"}},
    }  # fmt: skip


def _limit(limit: int, size: int) -> list[Spec]:
    """The end of the device's memory."""
    at: Spec = {"y": {"datum": limit / size, "type": "quantitative"}}
    label = text(f"limit {human_bytes(limit)}", f"上限 {human_bytes(limit)}")
    return [
        {"data": {"values": [{}]}, "mark": {"type": "rule", "color": "var(--fail)", "strokeDash": [8, 4], "strokeWidth": 1.5}, "encoding": at},
        {
            "data": {"values": [{}]},
            "mark": {"type": "text", "align": "left", "baseline": "top", "dx": 4, "dy": 4, "color": "var(--fail)"},
            "encoding": {**at, "x": {"value": 0}, "text": {"value": label}},
        },
    ]  # fmt: skip


def _above(top: float) -> Spec:
    """Room for what is written over the highest bar: the names of the stages begin where the axis ends."""
    y = {"datum": top, "type": "quantitative"}
    return {"data": {"values": [{}]}, "mark": {"type": "point", "opacity": 0}, "encoding": {"y": y}}


def _peak(size: int, *, on_the_left: bool) -> Spec:
    side = {"align": "right", "dx": -2} if on_the_left else {"align": "left", "dx": -3}
    label = {"en": "'peak ' + datum.written + ' ▼'" if on_the_left else "'▼ peak ' + datum.written"}
    label["zh"] = label["en"].replace("peak", "峰值")
    return {
        "transform": [
            {"filter": "isValid(datum.peak)"}, {"calculate": f"datum.peak / {size}", "as": "size"}, {"calculate": "datum.at + 0.5", "as": "middle"},
            *writing("datum.peak"), {"calculate": label, "as": "label"},
        ],
        "mark": {"type": "text", **side, "dx": 5 if on_the_left else -5, "dy": -3, "baseline": "bottom", "fontWeight": 600},
        "encoding": {"x": {"field": "middle", "type": "quantitative"}, "y": {"field": "size", "type": "quantitative"}, "text": {"field": "label"}},
    }  # fmt: skip
