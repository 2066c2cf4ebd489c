"""The charts of the overview as Vega-Lite specifications: where the time goes, where the memory goes.

Rows have what stands beside a bar (`bar`) and what is said of a part of it (`told`) in both languages: `theme.dressed` picks one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flowledger.flow.kinds import KINDS
from flowledger.flow.stages import order

Spec = dict[str, Any]

STRIP = 44  # height of a bar with what is between two
STAGE_COLOURS = {stage: f"var(--stage-{stage})" for stage in order()} | {"between": "var(--residue)"}
KIND_COLOURS = {kind: f"var(--{kind})" for kind in KINDS} | {"unknown": "var(--residue)"}


TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
SIZES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))


def unit_of(most: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The largest unit of which the longest bar has one at least."""
    return next((unit for unit in units if most >= unit[1]), units[-1])


def time_spec(stages: Sequence[str], unit: str, bars: int) -> Spec:
    """Bars of steps, each the sum of its stages; what a stage waited for other ranks is paler."""
    opacity = {
        "field": "part", "type": "ordinal", "legend": None, "scale": {"domain": ["own", "waiting"], "range": [1, 0.35]},
    }  # fmt: skip
    colours = {stage: STAGE_COLOURS.get(stage, "var(--residue)") for stage in stages}
    return _strips(colours=colours, field="stage", unit=unit, bars=bars, more={"opacity": opacity})


def memory_spec(kinds: Sequence[str], unit: str, bars: int, limit: float | None) -> Spec:
    """Bars of peaks, each the sum of what it is made of; a rule where the device ends. `limit`: in the unit."""
    spec = _strips(colours={kind: KIND_COLOURS[kind] for kind in kinds}, field="kind", unit=unit, bars=bars)
    if limit is None:
        return spec
    mark = {"type": "rule", "strokeDash": [5, 3], "strokeWidth": 2, "color": "var(--fail)"}
    strips = {"mark": spec.pop("mark"), "encoding": spec.pop("encoding")}
    return {**spec, "layer": [strips, {"mark": mark, "encoding": {"x": {"datum": limit}}}]}


def _strips(*, colours: Mapping[str, str], field: str, unit: str, bars: int, more: Spec | None = None) -> Spec:
    return {
        "width": "container", "height": STRIP * bars,
        "mark": {"type": "bar", "stroke": "var(--paper)", "strokeWidth": 1, "height": {"band": 0.7}},
        "encoding": {
            "y": {"field": "bar", "type": "nominal", "sort": None, "axis": {"title": None, "domain": False, "ticks": False, "labelLimit": 240}},
            "x": {"field": "amount", "type": "quantitative", "stack": "zero", "axis": {"title": unit, "format": ".3~r", "tickCount": 6, "grid": True}},
            "color": {"field": field, "type": "nominal", "legend": None, "scale": {"domain": [*colours], "range": [*colours.values()]}},
            "order": {"field": "at", "type": "quantitative"},
            "tooltip": [{"field": "told", "title": " "}],
            **(more or {}),
        },
    }  # fmt: skip
