"""Ranks as pictures: what each did in each stage, as heat. Which slice a rank holds and where a sample went are drawn by the page alone."""

from collections.abc import Iterator, Mapping
from typing import Any

from flowledger.show.page.book import Text, text
from flowledger.show.words import human_bytes, human_count, human_seconds

Spec = dict[str, Any]
Row = dict[str, Any]

MOST_WRITTEN = 16  # ranks whose numbers are written into the squares
SHOWN = {
    "seconds": (text("Time of each rank in each stage", "每个 rank 在各阶段的耗时"), human_seconds),
    "waited": (text("How long each rank waited for the others", "每个 rank 等待其他 rank 的时间"), human_seconds),
    "tokens": (text("Tokens of each rank", "每个 rank 的 token 数"), human_count),
    "peak": (text("Peak memory of each rank", "每个 rank 的显存峰值"), human_bytes),
}
SAYS = text("Colour: the share of the largest number in the row.", "颜色：占该行最大值的比例。")
WHOLE = text("whole step", "整步")


def pictures(data: Mapping[str, Any]) -> Iterator[tuple[str, Text, Spec, list[Row]]]:
    """(what, title, specification, rows) of each measure that several ranks have."""
    for what, (title, writing) in SHOWN.items():
        rows: list[Row] = [
            {
                "stage": stage or WHOLE["en"],
                "rank": rank,
                "share": number / most if most else 0,
                "written": writing(number),
            }
            for stage, numbers in data["heat"].get(what, {}).items()
            for most in [max((one for one in numbers if one is not None), default=0)]
            for rank, number in enumerate(numbers)
            if number is not None
        ]
        if len({row["rank"] for row in rows}) > 1:
            yield (
                what,
                title,
                _spec(list(dict.fromkeys(row["stage"] for row in rows)), len({row["rank"] for row in rows})),
                rows,
            )


def _spec(stages: list[str], ranks: int) -> Spec:
    label = {lang: f"datum.label === '{WHOLE['en']}' ? '{WHOLE[lang]}' : datum.label" for lang in ("en", "zh")}
    x = {
        "field": "rank",
        "type": "ordinal",
        "axis": {"labelAngle": 0, "labelOverlap": True, "orient": "top"},
        "title": "rank",
    }
    y = {"field": "stage", "type": "nominal", "sort": stages, "title": None, "axis": {"labelExpr": label}}
    colour = {
        "field": "share", "type": "quantitative", "scale": {"domain": [0, 1], "range": ["var(--panel)", "var(--heat)"], "interpolate": "rgb"}, "legend": None,
    }  # fmt: skip
    layers: list[Spec] = [
        {"mark": {"type": "rect", "stroke": "var(--paper)"}, "encoding": {"x": x, "y": y, "color": colour}}
    ]
    if ranks <= MOST_WRITTEN:
        layers.append(
            {"mark": {"type": "text", "fontSize": 11}, "encoding": {"x": x, "y": y, "text": {"field": "written"}}}
        )
    return {"$schema": "https://vega.github.io/schema/vega-lite/v6.json", "height": {"step": 26}, "layer": layers}
