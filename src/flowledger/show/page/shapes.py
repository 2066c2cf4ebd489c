"""The shape ledger: every tensor of every stage, planned and recorded side by side, and what each tensor is for."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flowledger.flow.stages import order
from flowledger.flow.tensors import Form, Tensor, tensors
from flowledger.show import tables
from flowledger.show.page.book import Book, Rows, text
from flowledger.show.page.choice import Choice

Data = dict[str, Any]

NOTHING = text("No tensor was recorded or planned.", "没有记录或计划任何张量。")
NO_TENSORS = text(
    "This run was recorded at level steps: tensors are recorded from record.level = tensors on.",
    "本次运行的记录级别是 steps：record.level = tensors 起才记录张量。",
)
IMPORTED = text(
    "This run was imported from a log: logs name no shapes. `flowledger record` or the recorder's probes see them.",
    "本次运行由日志导入：日志中没有形状。`flowledger record` 或记录器的探针才能看到。",
)
ONLY_THE_PLAN = text(
    "No tensor was recorded in this run; what is shown is its plan.", "本次运行没有记录张量；显示的是它的计划。"
)
LEFT_OUT = frozenset({"run", "common_bug", "common_bug_zh", "place"})  # said once a tensor, or known of the whole page
OUTCOMES = ("equal", "explained", "unequal")  # from the best to the worst
MOST = 4  # planned forms beside one row


def choices(book: Book) -> Sequence[Choice]:
    """All steps together."""
    return [Choice()]


def data(book: Book, at: Choice) -> Data:
    """`rows`: one a stage, phase and tensor, as `show RUN shapes` has them, each with what was `planned`; `tensors`: what each is for."""
    rows = tables.table(book.ledger, "shapes").rows
    recorded = any(row["source"] != "plan" for row in rows)
    planned = book.expected("FROM shapes") if recorded else []
    if not rows and book.planned is not None:
        rows = book.expected("FROM shapes")
    if not rows:
        return {"absent": True, "missing": [_why_none(book)]}
    shown = [_kept(row) for row in rows]
    if recorded and book.agreement:
        shown = sorted([*shown, *_judged(shown, book.agreement)], key=lambda row: _position(row["stage"]))
    elif planned:
        _laid_beside(shown, planned)
    return {
        "rows": shown,
        "beside": recorded and bool(book.agreement or planned),
        "judged": bool(recorded and book.agreement),
        "tensors": {name: explained(tensors()[name]) for name in _names(shown) if name in tensors()},
        "bindings": book.ledger.directory.manifest.bindings,
        "missing": [] if recorded or book.is_plan else [ONLY_THE_PLAN],
    }


def _why_none(book: Book) -> dict[str, str]:
    level = book.ledger.directory.manifest.level
    return {"steps": NO_TENSORS, "import": IMPORTED}.get(level, NOTHING)


def _position(stage: str) -> int:
    return order().index(stage) if stage in order() else len(order())


def _kept(row: Mapping[str, Any]) -> Data:
    return {name: value for name, value in row.items() if name not in LEFT_OUT}


def _names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["tensor_name"] for row in rows))


# ------------------------------------------------------------------------------------------------------------------ plan and run


def _judged(rows: list[Data], agreement: Sequence[Mapping[str, Any]]) -> list[Data]:
    """Puts beside each row what `diff` says of its tensor; hands back rows of what the run has not, or has under another name."""
    forms: dict[tuple[str, str], list[Data]] = defaultdict(list)
    for row in rows:
        forms[row["stage"], row["tensor_name"]].append(row)
    named = {(said["stage"], said["tensor_name"]) for said in agreement}
    renamed = [row for row in rows if (row["stage"], row["tensor_name"]) not in named]
    alone = []
    for said in agreement:
        here = forms[said["stage"], said["tensor_name"]]
        same = [row for row in here if row["dims"] == said["dims"]]
        found = same or [row for row in (*here, *renamed) if _is_of(row, said)]
        for row in found:
            row.setdefault("planned", []).append(_side(said, row))
        if not found:
            alone.append(_alone(said))
    for row in (*rows, *alone):
        if "planned" in row:
            row["outcome"] = _worst(one["outcome"] for one in row["planned"])
            row["planned"] = sorted(row["planned"], key=lambda one: -_badness(one["outcome"]))[:MOST]
    return alone


def _is_of(row: Mapping[str, Any], said: Mapping[str, Any]) -> bool:
    """Whether a row with other names, of dims or of the tensor, is the one that `diff` looked at: its sizes are the same."""
    here = row["stage"] == said["stage"] and said.get("local_shape") is not None
    return here and row["local_shape"] == said["local_shape"]


def _side(said: Mapping[str, Any], row: Mapping[str, Any]) -> Data:
    """What was planned of a row. `name`: where the plan has the tensor under another."""
    return {
        "logical_shape": said.get("planned_logical_shape"), "local_shape": said.get("planned_local_shape"),
        "dims": said["dims"], "dtype": said.get("planned_dtype"), "outcome": said["outcome"], "why": list(said["why"]),
        "ranks": said.get("ranks") or None, "name": None if row["tensor_name"] == said["tensor_name"] else said["tensor_name"],
    }  # fmt: skip


def _alone(said: Mapping[str, Any]) -> Data:
    """A row of the page for what only the plan has, or what the run has under another name."""
    blank = dict.fromkeys(
        ("phase", "logical_shape_min", "mask", "mask_fits", "owner_rank", "lifetime", "kind", "bytes")
    )
    return {
        **blank, "stage": said["stage"], "phase": said.get("phase"), "tensor_name": said["tensor_name"], "dims": said["dims"],
        "logical_shape": said.get("logical_shape"), "local_shape": said.get("local_shape"),
        "local_shape_min": said.get("local_shape_min"), "dtype": said.get("dtype"), "planned": [_side(said, said)],
    }  # fmt: skip


def _badness(outcome: str) -> int:
    return OUTCOMES.index(outcome) if outcome in OUTCOMES else 0


def _worst(outcomes: Iterable[str]) -> str:
    return max(outcomes, key=_badness)


def _laid_beside(rows: list[Data], planned: Rows) -> None:
    """The planned form of the same stage, tensor and dims beside each row, where the two could not be compared."""
    forms: dict[tuple[str, str, str], list[Data]] = defaultdict(list)
    for row in planned:
        side = {name: row[name] for name in ("logical_shape", "local_shape", "dims", "dtype")}
        place = forms[row["stage"], row["tensor_name"], row["dims"]]
        if side not in place:
            place.append(side)
    for row in rows:
        if found := forms.get((row["stage"], row["tensor_name"], row["dims"])):
            row["planned"] = [
                {**side, "outcome": None, "why": [], "ranks": None, "name": None} for side in found[:MOST]
            ]


# ---------------------------------------------------------------------------------------------------------------- what it is for


def explained(row: Tensor) -> Data:
    """What the flow says of a tensor: what `explain NAME` prints, for the panel of a row."""
    return {
        "purpose": text(row.purpose, row.purpose_zh),
        "common_bug": text(row.common_bug, row.common_bug_zh),
        "forms": [_form(form) for form in row.forms],
        "mask": row.mask,
        "producer": row.producer,
        "also_written_by": list(row.also_written_by),
        "readers": list(row.readers),
        "freed_by": row.freed_by,
        "lifetime": row.lifetime,
        "owner": row.owner,
        "kind": row.kind,
        "dtype": row.dtype,
        "placement": dict(row.placement),
        "aliases": list(row.aliases),
    }


def _form(form: Form) -> Data:
    return {
        "form": form.name,
        "shape": form.shape,
        "padding": form.padding,
        "broadcast": form.broadcast,
        "source": form.source,
    }
