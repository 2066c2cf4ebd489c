"""Lifetimes as a picture: the bars of the view as one Vega-Lite specification, for where no browser draws them."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowledger.flow.kinds import KINDS
from flowledger.show.page.book import text
from flowledger.show.page.memory_charts import COLOURS
from flowledger.show.words import human_bytes

Spec = dict[str, Any]
Row = dict[str, Any]

MOST = 70  # bars; of more, those with a name and the largest of the others
UNNAMED = "·"  # a storage that is no tensor of the flow
SAME = "\u200b"  # between names that are alike: an axis takes equal ones for one


def picture(data: Mapping[str, Any]) -> tuple[Spec, list[Row]]:
    """(specification, its rows). A row is a part of a bar: needed, held, read or planned; columns count from 0."""
    lines = _chosen(data)
    end = len(data["columns"]) + 1  # one more behind the step
    rows = [
        {**part, "line": _named(row, at), "kind": row["kind"]}
        for at, row in enumerate(lines)
        for part in _parts(row, end)
    ]
    places = [one["stage"] if one["phase"] is None else f"{one['stage']}/{one['phase']}" for one in data["columns"]]
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    return _spec([_named(row, at) for at, row in enumerate(lines)], [*places, "after the step"], kinds), rows


def _chosen(data: Mapping[str, Any]) -> list[Row]:
    """What stays first, then the rows in their order."""
    stays = [{"born": 0, **one, "freed": None, "due": None, "stays": True, "storages": 1} for one in data["persistent"]]
    rows = [row for row in data["rows"] if row["born"] is not None]
    ranked = sorted(rows, key=lambda row: (row["tensor_name"] is None, -(row["bytes"] or 0)))[: MOST - len(stays)]
    kept = {id(row) for row in ranked}
    return [*stays, *(row for row in rows if id(row) in kept)]


def _named(row: Row, at: int) -> str:
    times = f" ×{row['storages']}" if (row.get("storages") or 1) > 1 else ""
    size = "" if row["bytes"] is None else f"  {human_bytes(row['bytes'])}"
    return f"{row['tensor_name'] or UNNAMED}{times}{size}{SAME * at}"


def _parts(row: Row, end: int) -> list[Row]:
    """The last column belongs to it: a bar ends behind it."""
    freed = end if row["freed"] is None else min(row["freed"] + 1, end)
    needed = freed if row["due"] is None else min(row["due"] + 1, freed)
    parts: list[Row] = [{"part": "needed", "from": row["born"], "to": needed}]
    if needed < freed:
        parts.append({"part": "held", "from": needed, "to": freed, "outlives": bool(row.get("outlives"))})
    parts += [{"part": "read", "from": at + 0.5} for at in dict.fromkeys(row["reads"] or ()) if at is not None]
    if plan := row.get("plan"):
        parts.append(
            {
                "part": "planned",
                "from": plan["born"],
                "to": end if plan["freed"] is None else min(plan["freed"] + 1, end),
            }
        )
    return parts


def _spec(lines: Sequence[str], places: Sequence[str], kinds: Sequence[str]) -> Spec:
    """Stages and phases are columns of equal width, named above."""
    axis = {
        "orient": "top", "values": [at + 0.5 for at in range(len(places))], "labelExpr": f"{list(places)!r}[floor(datum.value)]",
        "labelAngle": -32, "labelAlign": "left", "labelOverlap": False, "grid": False, "ticks": False, "title": None,
    }  # fmt: skip
    x = {"field": "from", "type": "quantitative", "scale": {"domain": [0, len(places)], "nice": False}, "axis": axis}
    y = {
        "field": "line",
        "type": "nominal",
        "sort": list(lines),
        "title": None,
        "axis": {"labelLimit": 280, "ticks": False, "domain": False},
    }
    colour = {"field": "kind", "type": "nominal", "scale": {"domain": list(kinds), "range": [COLOURS[kind] for kind in kinds]},
              "legend": {"orient": "bottom", "title": None, "symbolOpacity": 1}}  # fmt: skip
    borders = [{"at": at} for at in range(len(places) + 1)]
    layers = [
        {"data": {"values": borders}, "mark": {"type": "rule", "color": "var(--line)"}, "encoding": {"x": {"field": "at", "type": "quantitative"}}},
        _layer("needed", {"type": "bar", "height": 9, "cornerRadius": 1.5}, x, y, color=colour, x2={"field": "to"}),
        _layer("held", {"type": "bar", "height": 4, "opacity": 0.45}, x, y, x2={"field": "to"},
               color={"condition": {"test": "datum.outlives", "value": "var(--fail)"}, **colour}),
        _layer("planned", {"type": "rule", "strokeDash": [4, 2], "yOffset": -7, "color": "var(--ink)"}, x, y, x2={"field": "to"}),
        _layer("read", {"type": "tick", "thickness": 1.6, "size": 12, "color": "var(--ink)"}, x, y),
    ]  # fmt: skip
    return {"$schema": "https://vega.github.io/schema/vega-lite/v6.json", "height": {"step": 16}, "layer": layers}


def _layer(part: str, mark: Spec, x: Spec, y: Spec, **more: Any) -> Spec:
    return {"transform": [{"filter": f"datum.part === '{part}'"}], "mark": mark, "encoding": {"x": x, "y": y, **more}}


TITLE = text("Lifetimes: from where to where each tensor lives", "生命周期：每个张量从哪里活到哪里")
SAYS = text(
    "Wide: needed. Thin: past its need, let go as its step or stage ends; red where it outlives its need. Strokes: read. Dashed: as planned.",
    "宽：需要期间。窄：已过所需，随本步或本阶段结束释放；红色为超出所需仍存活。竖线：读取。虚线：计划。",
)
