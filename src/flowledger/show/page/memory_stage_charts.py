"""The charts of memory stage by stage, as Vega-Lite specifications: planned beside measured, over the ranks, over tokens.

Rows come apart from them (`memory_ranks`): one a stage and source, a stage and rank, or a micro-batch.
"""

from collections.abc import Sequence

from flowledger.show.page.memory_charts import PLACE, SCHEMA, WORDS, Spec, colours, field, folded, unit, writing


def by_stage(kinds: Sequence[str], *, most: float, stages: Sequence[str]) -> Spec:
    """The fullest instant of each stage by kind, planned beside measured, on one axis."""
    size, name = unit(most)
    places: Spec = {
        "x": {"field": "stage", "type": "nominal", "sort": list(stages), "title": None, "axis": {"labelAngle": -30}},
        "xOffset": {"field": "source", "type": "nominal", "sort": ["plan", "run"]},
    }
    amounts: Spec = {"field": "size", "type": "quantitative", "stack": "zero", "title": name}
    bars: Spec = {
        "transform": folded(kinds, size),
        "mark": {"type": "bar", "stroke": "var(--paper)", "strokeWidth": 0.5},
        "encoding": {
            **places, "y": amounts, "color": colours(kinds), "order": {"field": "order"},
            "opacity": {"condition": {"test": "datum.source === 'plan'", "value": 0.55}, "value": 1},
            "tooltip": [field("stage", "stage"), field("source", "source"), field("kind", "kind"), field("written", "bytes")],
        },
    }  # fmt: skip
    names: Spec = {
        "transform": [{"calculate": f"datum.whole / {size}", "as": "size"}, *writing("datum.whole")],
        "mark": {"type": "text", "angle": 270, "align": "left", "baseline": "middle", "dx": 4, "fontSize": 10, "color": "var(--soft)"},
        "encoding": {
            **places, "y": {"field": "size", "type": "quantitative"},
            "text": {"field": "label", "type": "nominal"},
        },
    }  # fmt: skip
    said = {"en": "(datum.source === 'plan' ? 'planned ' : '')", "zh": "(datum.source === 'plan' ? '计划 ' : '')"}
    names["transform"].append(
        {"calculate": {lang: f"{prefix} + datum.written" for lang, prefix in said.items()}, "as": "label"}
    )
    return {"$schema": SCHEMA, "width": "container", "height": 260, "layer": [bars, names]}


def over_ranks(*, most: float, stages: Sequence[str]) -> Spec:
    """The peak of each stage on every rank, with the smallest, the median and the largest."""
    size, name = unit(most)
    y: Spec = {
        "field": "stage",
        "type": "nominal",
        "sort": list(stages),
        "title": None,
        "axis": {"grid": True, "domain": False},
    }
    x: Spec = {"type": "quantitative", "title": name, "axis": {"tickCount": 8}}
    sized = {"calculate": f"datum.bytes / {size}", "as": "size"}
    summed = {
        "aggregate": [{"op": op, "field": "size", "as": op} for op in ("min", "median", "max")], "groupby": ["stage"],
    }  # fmt: skip
    reach = {"type": "rule", "strokeWidth": 2, "color": "var(--line)"}
    middle = {"type": "tick", "thickness": 2, "size": 16, "color": "var(--ink)"}
    points: Spec = {
        "transform": [sized, *writing("datum.bytes")],
        "mark": {"type": "circle", "opacity": 0.75},
        "encoding": {
            "x": {**x, "field": "size", "scale": {"zero": False}}, "y": y,
            "size": {"condition": {"test": "datum.chosen", "value": 110}, "value": 36},
            "color": {"condition": {"test": "datum.chosen", "value": "var(--fail)"}, "value": "var(--accent)"},
            "tooltip": [field("stage", "stage"), field("rank", "rank"), field("rank_count", "ranks"), field("written", "bytes")],
        },
    }  # fmt: skip
    return {
        "$schema": SCHEMA, "width": "container", "height": 24 * len(stages),
        "layer": [
            {"transform": [sized, summed], "mark": reach, "encoding": {"x": {**x, "field": "min"}, "x2": {"field": "max"}, "y": y}},
            points,
            {"transform": [sized, summed], "mark": middle, "encoding": {"x": {**x, "field": "median"}, "y": y}},
        ],
    }  # fmt: skip


def by_tokens(*, most: float) -> Spec:
    """The fullest instant of each micro-batch over its tokens: what a batch that varies does to the peak."""
    size, name = unit(most)
    return {
        "$schema": SCHEMA, "width": "container", "height": 200,
        "transform": [PLACE, {"calculate": f"datum.bytes / {size}", "as": "size"}, *writing("datum.bytes")],
        "mark": {"type": "point", "filled": True, "size": 50},
        "encoding": {
            "x": {"field": "tokens", "type": "quantitative", "scale": {"zero": False}, "title": WORDS["tokens of the micro-batch"]},
            "y": {"field": "size", "type": "quantitative", "scale": {"zero": False}, "title": name},
            "color": {"field": "stage", "type": "nominal", "legend": {"orient": "bottom", "title": None}, "scale": {"range": ["var(--accent)", "var(--warn)", "var(--pass)", "var(--fail)"]}},
            "shape": {"field": "stage", "type": "nominal"},
            "tooltip": [field("place", "place"), field("tokens", "tokens"), field("written", "bytes"),],
        },
    }  # fmt: skip
