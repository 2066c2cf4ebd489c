"""The map of a job: which rank stands where in the mesh, and what it has of layers, heads, experts and the batch.

One row a rank; beyond MOST_RANKS one row a rank class. A question (`Asked`) leaves the ranks that hold what it names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowledger.flow.errors import BadInput
from flowledger.flow.layout import Asked, Found, Layout, find
from flowledger.flow.mesh import Mesh
from flowledger.flow.rank_classes import RankClass, rank_classes, spans
from flowledger.ledger.reader import Ledger
from flowledger.show import layout as ledger_layout
from flowledger.show.columns import Column, Rows, Table
from flowledger.show.tables import check_step

MOST_RANKS = 32  # that are listed one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What `show RUN mesh` is asked for; None is left open."""

    sample: int | None = None
    token: int | None = None
    head: int | None = None
    layer: int | None = None
    expert: int | None = None

    @property
    def named(self) -> dict[str, int]:
        """What it asks for by name."""
        words = ("sample", "token", "head", "layer", "expert")
        return {word: number for word in words if (number := getattr(self, word)) is not None}

    @property
    def asked(self) -> Asked:
        """The element; a token still has to be placed in its row."""
        return Asked(sample=self.sample, token=self.token, head=self.head, layer=self.layer, expert=self.expert)


def mesh_table(
    ledger: Ledger, *, step: int | None = None, stage: str | None = None, question: Question | None = None
) -> Table:
    """The map, or who holds one element of it. `step`: whose samples; None: the last that trained on the sample asked for, or on any.

    Raises BadInput for what the job does not have, for a step that is not there, and for a token without its sample.
    """
    if stage is not None:
        raise BadInput("--stage does not apply to mesh: it is the same in every stage that trains; leave it out")
    if step is not None:
        check_step(ledger, step)
    step = ledger_layout.step_of(ledger, question.sample if question else None, step)
    trained = ledger_layout.trained(ledger, step)
    made = ledger_layout.layout(ledger, trained)
    hosts = _hosts(ledger)
    if question is None or not question.named:
        rows = _map(made, hosts, ledger.directory.manifest.rank_classes)
        return Table("mesh", ledger.run, _columns(made, hosts, rows), rows)
    sizes = ledger.directory.manifest.bindings
    if question.expert is not None and "L" in sizes and "E" not in sizes:  # a size of every model, and one of some
        raise BadInput(f"expert {question.expert} is not there: the model has no experts")
    asked, notes = question.asked, list[str]()
    if question.sample is not None and not trained:
        notes += filter(None, [ledger_layout.dealing(ledger)])
    if question.sample is not None and question.token is not None:
        samples = trained or ledger_layout.assumed(ledger, made, question.sample)
        row, place, token = ledger_layout.row_of(ledger, samples, question.sample, question.token)
        asked = replace(asked, row=row, place=place, token=token)
        notes += [] if trained else [ledger_layout.assumption(samples, question.sample)]
    rows = [row for found in find(made, asked) for row in _holding(made, hosts, found)]
    columns = (Column("where"), Column("index", form="count", sparse=True), *_columns(made, hosts, rows))
    whose = {} if question.sample is None or not trained else {"step": step}
    return Table(
        "mesh",
        ledger.run,
        columns,
        rows,
        summary={"asked": question.named, **whose, **({"notes": notes} if notes else {})},
    )


def _map(made: Layout, hosts: Mapping[int, tuple[str, str]], named: Mapping[str, Sequence[int]]) -> Rows:
    """`named`: the classes of the manifest, where it has them."""
    classes = classes_of(made)
    if made.on.size > MOST_RANKS:
        return [_row(made, hosts, one.ranks(made.on), one.name) for one in classes]
    names = {rank: name for name, ranks in named.items() for rank in ranks}
    return [
        _row(made, hosts, (rank,), names.get(rank) or _class_name(classes, made.on, rank))
        for rank in range(made.on.size)
    ]


def classes_of(made: Layout) -> tuple[RankClass, ...]:
    """Ranks with equally many layers, heads, experts and samples."""
    numbers = ((made.heads, "tp"), (made.experts, "ep"), (0 if made.dealt else made.samples, "dp"))
    cut = [((number,), {axis: "Shard(0)"}) for number, axis in numbers]
    return rank_classes(made.on, cut, made.stages)


def _holding(made: Layout, hosts: Mapping[int, tuple[str, str]], found: Found) -> Rows:
    """The ranks that hold something: one by one, or together where they are many."""
    each = [(rank,) for rank in found.ranks] if len(found.ranks) <= MOST_RANKS else [found.ranks]
    named = {"where": found.where, "index": found.index}
    return [{**named, **_row(made, hosts, ranks, None)} for ranks in each]


def _row(made: Layout, hosts: Mapping[int, tuple[str, str]], ranks: Sequence[int], name: str | None) -> dict[str, Any]:
    """What these ranks have, and where they stand: `16 each` where every one has others."""
    first, on = ranks[0], made.on
    mine, total = made.samples_of(first), len(made.dealt) or made.samples
    where = {axis: sorted({on.at(rank, axis) for rank in ranks}) for axis, _ in on.degrees}
    recorded = [hosts[rank] for rank in ranks if rank in hosts]

    def of(numbers: Sequence[int], axis: str) -> str:
        return spans(numbers) if len(where[axis]) == 1 or not numbers else f"{len(numbers)} each"

    return {
        "first_rank": first, "ranks": spans(ranks), "rank_count": len(ranks), **{axis: spans(at) for axis, at in where.items()},
        "host": _one_of({host for host, _ in recorded}), "device": _one_of({device for _, device in recorded}),
        "layers": of(made.layers_of(first), "pp"), "heads": of(made.heads_of(first), "tp"),
        "kv_heads": of(made.kv_heads_of(first), "tp"), "experts": of(made.experts_of(first), "ep"),
        "samples": len(mine), "share": len(mine) / total if total else None, "rank_class": name,
    }  # fmt: skip


def _columns(made: Layout, hosts: Mapping[int, tuple[str, str]], rows: Rows) -> tuple[Column, ...]:
    """Axes of degree 1, and what nothing is known of: only with --wide. `ranks` goes over several lines where it is long."""
    on = made.on
    classes = any(row["rank_count"] > 1 for row in rows)
    axes = [Column(axis, wide=degree == 1) for axis, degree in on.degrees]
    hosts_differ = len({host for host, _ in hosts.values()}) > 1
    return (
        Column("first_rank", "from rank", "count", wide=True),
        Column("ranks", "ranks" if classes else "rank"),
        Column("rank_count", "how many", "count", wide=not classes), *axes,
        Column("host", wide=not hosts_differ), Column("device", wide=True),
        Column("layers", wide=not made.stages), Column("heads", wide=not made.heads),
        Column("kv_heads", "kv heads", wide=not made.kv_heads), Column("experts", wide=not made.experts),
        Column("samples", "samples in step", "count"), Column("share", "of batch", "percent"),
        Column("rank_class", "class", wide=True),  # the columns of the axes say it
    )  # fmt: skip


def _hosts(ledger: Ledger) -> dict[int, tuple[str, str]]:
    """Rank -> (host, device) of the processes that recorded."""
    rows = ledger.rows("SELECT rank, host, device FROM processes WHERE source = 'record' ORDER BY process")
    return {row["rank"]: (row["host"], row["device"]) for row in rows}


def _one_of(names: set[str]) -> str | None:
    if not names:
        return None
    return min(names) if len(names) == 1 else f"{min(names)} and {len(names) - 1} more"


def _class_name(classes: Sequence[RankClass], on: Mesh, rank: int) -> str:
    return next(one.name for one in classes if one.holds(on, rank))
