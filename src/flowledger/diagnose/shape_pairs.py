"""Every tensor of a plan beside what a run has recorded of it: joined by stage, name and dims, and judged rank by rank.

Phases do not part them: a stage may hand a tensor on before or within one. In another's loop tensors have forms of their
own, and the names of dimensions may be guesses: there every planned form is tried.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from flowledger.diagnose.sizes import OUTCOMES, UNEQUAL, Judged, Leeway, Seen, judge
from flowledger.flow.rank_classes import spans
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import TensorRow

Key = tuple[str, str, str]  # stage, tensor, dims
Match = tuple[Seen, TensorRow, Judged]

# (stage, tensor) that a function of several stages returns under its own name -> what it is there.
NAMED = {
    ("old_log_prob", "new_log_prob"): "old_log_prob",
    ("ref_log_prob", "new_log_prob"): "ref_log_prob",
    ("ref_log_prob", "entropy"): "ref_log_prob",
}  # fmt: skip
SUMS = frozenset({"activations", "comm_buffer"})  # recorded as sums of storages, without a shape of their own
WHOLE_MODEL = frozenset({"hidden_states"})  # one planned row, without a layer, for what each layer makes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One form of a tensor in one stage, on ranks and layers where it compares alike."""

    stage: str
    tensor_name: str
    dims: str
    outcome: str
    why: tuple[str, ...]
    planned: TensorRow
    smallest: tuple[int, ...]
    largest: tuple[int, ...]
    logical: tuple[int, ...] | None
    dtype: str
    ranks: str  # as `spans` writes them; empty for a process that is none
    layers: int


@dataclass(frozen=True, slots=True)
class Joined:
    """What both have, and what only one of them has."""

    pairs: list[Pair]
    planned: list[TensorRow]  # one row a form that the run has not
    recorded: list[Seen]  # …, that the plan has not


def seen(ledger: Ledger) -> list[Seen]:
    """What was recorded, over all steps and micro-batches. Empty pieces are left out: they fit any form."""
    rows = ledger.rows(
        "SELECT stage, tensor_name, dims, access, layer, rank, placement, dtype, padding, shape_min(local_shape) AS smallest, "
        "shape_max(local_shape) AS largest, shape_max(logical_shape) AS logical FROM accesses "
        "WHERE source <> 'plan' AND stage IS NOT NULL AND local_shape IS NOT NULL AND NOT list_contains(local_shape, 0) "
        "GROUP BY stage, tensor_name, dims, access, layer, rank, placement, dtype, padding, len(local_shape) ORDER BY ALL"
    )
    return [_seen(row) for row in rows]


def _seen(row: Mapping[str, Any]) -> Seen:
    name = NAMED.get((row["stage"], row["tensor_name"]), row["tensor_name"])
    sizes = {
        key: None if row[key] is None else tuple(row[key]) for key in ("placement", "smallest", "largest", "logical")
    }
    return Seen(**{**row, **sizes, "tensor_name": name})


def join(planned: Sequence[TensorRow], recorded: Iterable[Seen], leeway: Leeway) -> Joined:
    """Each recorded form beside the planned form of the same tensor in the same stage that fits it best."""
    forms: dict[tuple[str, str], list[TensorRow]] = defaultdict(list)
    for row in planned:
        forms[row.stage or "", row.tensor_name].append(row)
    matched: list[Match] = []
    alone: list[Seen] = []
    for one in recorded:
        found = _best(forms[one.stage, one.tensor_name], one, leeway)
        if found is not None:
            matched.append((one, *found))
        elif one.tensor_name not in SUMS:
            alone.append(one)
    met = {_key(row) for _, row, _ in matched}
    if leeway.named:
        others = [(one, _instead(one, forms[one.stage, one.tensor_name], met)) for one in alone]
        alone = [one for one, match in others if match is None]
        matched += [match for _, match in others if match is not None]
        met = {_key(row) for _, row, _ in matched}
    left = {_key(row): row for row in reversed(planned) if _key(row) not in met}
    return Joined(
        pairs=_pairs(matched, planned),
        planned=list(reversed(left.values())),
        recorded=list({(one.stage, one.tensor_name, one.dims): one for one in reversed(alone)}.values())[::-1],
    )


def _instead(one: Seen, rows: Sequence[TensorRow], met: Set[Key]) -> Match | None:
    """A form that was not planned, where one was planned that nobody has met: packed instead of padded."""
    row = next((row for row in rows if _key(row) not in met and len(row.local_shape or ()) == len(one.largest)), None)
    return None if row is None else (one, row, Judged(UNEQUAL, (f"in the form [{one.dims}], planned is {row.dims}",)))


def _pairs(matched: Iterable[Match], planned: Sequence[TensorRow]) -> list[Pair]:
    """Ranks and layers where a form compares alike together, in the order of the plan, which is that of the flow."""
    alike: dict[tuple[Any, ...], list[Match]] = defaultdict(list)
    for one, row, judged in matched:
        part = tuple(row.local_shape or ()), tuple(row.logical_shape or ())
        alike[*_key(row), judged, part, one.dtype].append((one, row, judged))
    places = {key: at for at, key in enumerate(dict.fromkeys(map(_key, planned)))}
    return [_pair(group) for _, group in sorted(alike.items(), key=lambda item: places[item[0][:3]])]


def _key(row: TensorRow) -> Key:
    return row.stage or "", row.tensor_name, (row.dims or "").strip("[] ")


def _best(rows: Sequence[TensorRow], one: Seen, leeway: Leeway) -> tuple[TensorRow, Judged] | None:
    """The planned row that a recorded form agrees with best; None where the plan has no such form."""
    if one.tensor_name in SUMS:
        return None
    same = [row for row in rows if _key(row)[2] == one.dims]
    if not leeway.named:
        same = [row for row in rows if len(row.local_shape or ()) == len(one.largest)]
    layered = [row for row in same if row.layer == one.layer or one.tensor_name in WHOLE_MODEL]
    here = list(_on_rank(layered, one.rank)) or layered or same
    judged = [(row, judge(row, one, leeway)) for row in here]
    return min(judged, key=lambda pair: _preference(one, *pair), default=None)


def _preference(one: Seen, row: TensorRow, judged: Judged) -> tuple[int, bool, int]:
    return OUTCOMES.index(judged.outcome), _key(row)[2] != one.dims, len(judged.why)


def _on_rank(rows: Sequence[TensorRow], rank: int | None) -> Iterator[TensorRow]:
    """The rows that stand for a rank: of classes of neighbours exactly those, else all that begin no later."""
    classes: dict[tuple[Any, ...], dict[int, int]] = defaultdict(dict)
    for row in rows:
        classes[_cut(row)][row.rank or 0] = row.rank_count or 1
    for row in rows:
        first, count, beside = row.rank or 0, row.rank_count or 1, sorted(classes[_cut(row)].items())
        neighbours = all(one + size == other for (one, size), (other, _) in pairwise(beside))
        if rank is None or (first <= rank < first + count if neighbours and len(beside) > 1 else first <= rank):
            yield row


def _cut(row: TensorRow) -> tuple[Any, ...]:
    return row.phase, row.access, row.dims, row.layer, tuple(row.placement or ())


def _pair(group: Sequence[Match]) -> Pair:
    one, row, judged = group[0]
    stage, name, dims = _key(row)
    sizes = [one for one, _, _ in group]
    return Pair(
        stage=stage, tensor_name=name, dims=dims, outcome=judged.outcome, why=judged.why, planned=row, dtype=one.dtype,
        smallest=tuple(map(min, zip(*(other.smallest for other in sizes), strict=True))),
        largest=tuple(map(max, zip(*(other.largest for other in sizes), strict=True))),
        logical=one.logical, ranks=spans(sorted({other.rank for other in sizes if other.rank is not None})),
        layers=len({other.layer for other in sizes}),
    )  # fmt: skip
