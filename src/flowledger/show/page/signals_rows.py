"""Rows for the charts of signals, for a drawer without a browser: the same that `signals*.js` make of the page's data."""

from collections.abc import Mapping
from typing import Any

from flowledger.show.page.packed import unpacked
from flowledger.show.page.signals_charts import ROW, Spec, drawn, is_flat

Rows = list[dict[str, Any]]
Data = Mapping[str, Any]

WIDTH = 250
FEW = 40  # points that are drawn besides their line
APART = 0.03  # of a step: labels that stand closer would lie on one another


def metric_picture(data: Data, metric: Data) -> Spec:
    """A metric over the steps, under its name."""
    rows = metric_rows(data, metric)
    title = f"{metric['name']} ({metric['unit']})" if metric["unit"] not in ("", "1") else metric["name"]
    return {
        **drawn(data["charts"]["metric"], rows),
        "width": WIDTH,
        "data": {"values": rows},
        "title": {"text": title, "fontSize": 12},
    }


def metric_rows(data: Data, metric: Data) -> Rows:
    """Values, what is none of them (nan, inf), the healthy range and the alarms."""
    rows: Rows = []
    seen = sum(value is not None for value in metric["values"]) <= FEW
    for at, (step, value) in enumerate(zip(data["steps"], metric["values"], strict=True)):
        special = metric["special"].get(at)
        if value is None and special is None:
            continue
        rows.append({"kind": "value", "step": step, "value": value})
        if value is not None:
            rows.append({"kind": "point", "step": step, "value": value, "seen": seen})
        else:
            rows.append({"kind": "special", "step": step, "written": special})
    if metric["shade"]:
        rows.append({"kind": "healthy", "low": metric["shade"][0], "high": metric["shade"][1]})
    told = [value for value in metric["values"] if value is not None]
    if told and is_flat(told) and not metric["shade"]:
        one = told[0]
        rows += [{"kind": "room", "value": one + sign * (abs(one) / 10 or 1)} for sign in (-1, 1)]
    fired = [alarm for alarm in data["alarms"] if alarm["step"] is not None and metric["name"] in alarm["metrics"]]
    return rows + [
        {"kind": "alarm", **{name: alarm[name] for name in ("step", "id", "verdict", "message")}} for alarm in fired
    ]


def timeline_picture(spec: Spec, shown: Data) -> tuple[Spec, Rows]:
    """The timeline of a step: as high as it has ranks, and its rows."""
    known = set(spec["layer"][0]["encoding"]["color"]["scale"]["domain"])
    rows: Rows = [
        {"kind": piece["what"], "row": piece["row"], "name": shown["rows"][piece["row"]], "begin": piece["begin"], "end": piece["end"],
         "told": piece["stage"], "stage": piece["stage"] if piece["stage"] in known else "other", "open": bool(piece.get("open"))}
        for piece in sorted(unpacked(shown["pieces"]), key=lambda piece: piece["row"])
    ]  # fmt: skip
    labels: Rows = []
    for row in sorted(
        (row for row in rows if row["kind"] == "stage" and row["row"] == 0), key=lambda row: row["begin"] - row["end"]
    ):
        middle = (row["begin"] + row["end"]) / 2
        if all(abs(other["middle"] - middle) >= APART * shown["ms"] for other in labels):
            labels.append({"kind": "label", "told": row["told"], "middle": middle})
    return {**drawn(spec, rows + labels), "height": ROW * len(shown["rows"])}, rows + labels


def distribution_pictures(data: Data) -> list[Spec]:
    """A histogram of each quantity in the last step that has one, with the whole run behind it."""
    made = []
    for one in data["distributions"]:
        rows = histogram_rows(one, len(one["steps"]) - 1)
        under = {
            lang: f"{one['what'][lang]}, {word} {one['steps'][-1]}" for lang, word in (("en", "step"), ("zh", "步"))
        }
        title = {"text": one["name"], "subtitle": under, "fontSize": 12}
        made.append(
            {
                **_ticked(drawn(data["charts"]["histogram"], rows), one["ticks"]),
                "width": WIDTH,
                "data": {"values": rows},
                "title": title,
            }
        )
    return made


def _ticked(spec: Spec, values: list[float] | None) -> Spec:
    """With these numbers named on its axis."""
    if values is None:
        return spec
    x = spec["layer"][0]["encoding"]["x"]
    named = {**x, "axis": {**x["axis"], "values": values, "labelExpr": "format(datum.value, '.6~g')"}}
    return {**spec, "layer": [{**one, "encoding": {**one["encoding"], "x": named}} for one in spec["layer"]]}


def histogram_rows(one: Data, at: int) -> Rows:
    """Shares between the edges, of the run and of the step at position `at`."""
    run = [sum(counts) for counts in zip(*one["counts"], strict=True)]
    mine = one["counts"][at]
    all_of_it, all_of_step = sum(run) or 1, sum(mine) or 1
    return [
        {"kind": kind, "begin": one["edges"][bin_], "end": one["edges"][bin_ + 1], "share": share}
        for bin_, (whole, count) in enumerate(zip(run, mine, strict=True))
        for kind, share in (("run", whole / all_of_it), ("step", count / all_of_step))
    ]
