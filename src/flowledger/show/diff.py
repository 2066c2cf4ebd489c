"""A plan beside a run, drawn for a terminal: settings that part, shapes, memory, checks, and the answer beneath them.

Takes the document that `diff --json` prints, and knows nothing of how it was compared.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from flowledger.flow.kinds import KINDS
from flowledger.flow.stages import order
from flowledger.show import terminal
from flowledger.show.columns import Column, Rows, Table
from flowledger.show.planned import SHORT
from flowledger.show.words import human_shape, written

Document = Mapping[str, Any]

SETTINGS = (Column("name", "setting"), Column("planned", form="count"), Column("recorded", form="count"))
SHAPES = (
    Column("stage"), Column("tensor_name", "tensors"), Column("planned"), Column("recorded"), Column("outcome"), Column("told", "why"),
    Column("on", "on ranks", sparse=True), Column("form", "dims", wide=True), Column("dtype", wide=True),
)  # fmt: skip
ONLY = (Column("stage"), Column("tensors"), Column("why"))
MEMORY = (
    Column("stage"), Column("step"), Column("on", "ranks"), Column("what", ""),
    *(Column(kind, SHORT.get(kind, kind), "bytes") for kind in KINDS if kind != "residue"),
    Column("total", form="bytes"), Column("difference"),
)  # fmt: skip
CHECKS = (Column("outcome"), Column("id"), Column("message"), Column("why"))
FINDINGS = (Column("verdict"), Column("id"), Column("stage"), Column("message"))
LOGGED = (
    Column("what"), Column("planned"), Column("recorded"), Column("difference"), Column("outcome"), Column("why"),
)  # fmt: skip
# Table -> what stands above it.
TITLES = {
    "diff_settings": "settings that are not the same",
    "diff_shapes": "shapes, planned and recorded",
    "diff_only_planned": "planned, and not seen in the run",
    "diff_only_recorded": "seen in the run, and not planned",
    "diff_memory": "memory of a rank at the peak of each stage",
    "diff_checks": "checks that did not hold when it was planned",
    "diff_findings": "findings of the run",
}


def draw(document: Document, run: str, screen: Console, *, wide: bool = False) -> None:
    """Print what plan and run say beside each other; the verdict comes last."""
    screen.print(_head(document, run))
    for made in tables(document, run, wide=wide):
        if made.rows:
            screen.print(Text(TITLES[made.name], style="bold"))
            terminal.draw(made, screen, wide=wide)
    for line in _lines(document, wide=wide):
        screen.print(Text(line, style="dim"))
    summary = document["summary"]
    screen.print(Text(summary["verdict"], style="green" if summary["agrees"] else "bold red"))


def draw_log(document: Document, run: str, screen: Console) -> None:
    """A plan beside what a log tells: lengths, a peak, and what a log does not have."""
    screen.print(
        Text.assemble(("plan ", "bold"), (document["plan"], "bold cyan"), ("    log ", "bold"), (run, "bold cyan"))
    )
    rows = [
        row | {side: written(row[side], "bytes" if row["unit"] == "bytes" else "count") for side in ("planned", "recorded")}
        | {"difference": "" if row["difference"] is None else f"{row['difference']:+.1%}"}
        for row in document["rows"]
    ]  # fmt: skip
    terminal.draw(Table("diff_logged", run, LOGGED, rows), screen)
    screen.print(Text(document["lacks"], style="dim"))
    screen.print(Text(document["verdict"], style="green" if document["agrees"] else "bold red"))


def tables(document: Document, run: str, *, wide: bool = False) -> Iterable[Table]:
    """The tables in their order. Without `wide` equal shapes are only counted, and tensors of a stage that one thing is said
    of stand on one line."""
    rows = [row for row in document["rows"] if wide or row["outcome"] != "equal"]
    shapes = [_shape(row, document["recorded"]["ranks"]) for row in rows]
    if not wide:
        shapes = _alike(shapes)
    yield Table("diff_settings", run, SETTINGS, document["settings"])
    yield Table("diff_shapes", run, SHAPES, shapes, section="stage")
    for name in ("only_planned", "only_recorded"):
        yield Table(f"diff_{name}", run, ONLY, _together(document[name], wide=wide), section="stage")
    peaks = [row for one in document["memory"] for row in _beside(one)]
    kept = tuple(column for column in MEMORY if column.form != "bytes" or any(row.get(column.name) for row in peaks))
    yield Table("diff_memory", run, kept, peaks)
    yield Table("diff_checks", run, CHECKS, document["checks"])
    yield Table("diff_findings", run, FINDINGS, [row for row in document["findings"] if row["verdict"] != "skipped"])


def _head(document: Document, run: str) -> Text:
    plan, recorded = document["plan"], document["recorded"]
    sides = [
        f"{' '.join(filter(None, (side['framework'], side['framework_version'])))}, {_mesh(side['mesh'])}"
        for side in (plan, recorded)
    ]
    return Text.assemble(
        ("plan ", "bold"), (plan["run"], "bold cyan"), f"  {plan['model']}  {sides[0]}    ", ("run ", "bold"),
        (run, "bold cyan"), f"  {sides[1]}, level {recorded['level']}, {recorded['state']}",
    )  # fmt: skip


def _mesh(mesh: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {degree}" for axis, degree in mesh.items() if degree > 1) or "one rank"


def _shape(row: Mapping[str, Any], ranks: str) -> dict[str, Any]:
    """The part of a rank, and where that is not all of it the whole on a line below; `ranks`: all that there are."""
    local, whole = row["planned_local_shape"], row["planned_logical_shape"]
    seen, of = row["local_shape"], row["logical_shape"]
    types = (row["planned_dtype"], row["dtype"])
    return {
        "stage": row["stage"], "tensor_name": row["tensor_name"], "outcome": row["outcome"], "told": "; ".join(row["why"]) or None,
        "planned": human_shape(local) + ("" if local == whole else f"\nof {human_shape(whole)}"),
        "recorded": human_shape(seen, row["local_shape_min"]) + ("" if of in (None, seen) or local == whole else f"\nof {human_shape(of)}"),
        "on": None if row["ranks"] == ranks else row["ranks"] or "none", "form": f"[{row['dims']}]", "dtype": " / ".join(dict.fromkeys(types)),
    }  # fmt: skip


def _alike(rows: Rows) -> Rows:
    """Tensors of a stage with the same shapes and the same reason together."""
    found: dict[tuple[Any, ...], list[str]] = {}
    same = ("stage", "planned", "recorded", "outcome", "told", "on")
    for row in rows:
        found.setdefault(tuple(row[name] for name in same), []).append(row["tensor_name"])
    return sorted(
        (
            dict(zip(same, key, strict=True)) | {"tensor_name": ", ".join(dict.fromkeys(names))}
            for key, names in found.items()
        ),
        key=lambda row: order().index(row["stage"]),
    )


def _together(rows: Rows, *, wide: bool) -> Rows:
    """One row a stage and reason, with the tensors that it holds for; wide: with their dims."""

    def place(row: Mapping[str, Any]) -> tuple[str, str]:
        return row["stage"], row["why"]

    stages = {row["stage"]: at for at, row in reversed(list(enumerate(rows)))}
    found = []
    for (stage, why), alike in groupby(sorted(rows, key=lambda row: (stages[row["stage"]], row["why"])), place):
        names = dict.fromkeys(
            f"{row['tensor_name']} [{row['dims'] or ''}]" if wide else row["tensor_name"] for row in alike
        )
        found.append({"stage": stage, "tensors": ", ".join(names), "why": why})
    return found


def _beside(one: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Two rows: what was planned, and what was recorded."""
    place = {"stage": one["stage"], "step": one["step"], "on": one["ranks"]}
    difference = "" if one["difference"] is None else f"{one['difference']:+.1%}"
    yield place | {"what": "planned", **one["planned"], "total": one["planned_total"], "difference": difference}
    yield dict.fromkeys((*place, "difference"), "") | {
        "what": "recorded",
        **(one["recorded"] or {}),
        "total": one["recorded_total"],
    }


def _lines(document: Document, *, wide: bool) -> Iterable[str]:
    """What stands in no table."""
    summary = document["summary"]
    if summary["equal"] and not wide:
        yield f"{summary['equal']} shapes are equal; --wide lists them"
    if document["memory"]:
        yield "difference: planned above (+) or below (-) recorded; a plan has every sample as long as it may be"
    if document["no_memory"]:
        yield f"memory: {document['no_memory']}"
    held, fired = summary["checks_held"], summary["checks_fired"]
    yield f"checks: {held} held when it was planned" + ("" if fired else ", none fired")
    skipped = [row["id"] for row in document["findings"] if row["verdict"] == "skipped"]
    if skipped:
        yield f"not checked in the run: {', '.join(dict.fromkeys(skipped))}"
