"""What of a job each rank works on (samples, tokens, heads, layers, experts), and who holds one of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from flowledger.flow.errors import BadInput
from flowledger.flow.mesh import Mesh, cut
from flowledger.flow.slices import Slices


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A model and a batch on a mesh. Numbers that are 0 are not known: questions about them are refused."""

    on: Mesh
    samples: int = 0  # B
    heads: int = 0  # A, query heads
    kv_heads: int = 0  # K
    experts: int = 0  # E
    stages: Sequence[Sequence[int]] = ()  # the layers of each pipeline rank
    dealt: Mapping[int, int] = field(default_factory=dict)  # sample -> dp rank, as recorded; empty: dealt in chunks
    cp_kind: Literal["ring", "all_to_all"] = "ring"
    sequence_parallel: bool = False  # Megatron's, over tp

    @property
    def layers(self) -> int:
        return sum(map(len, self.stages))

    def heads_of(self, rank: int) -> range:
        """The query heads whose weights a rank has."""
        return _chunk(self.heads, self.on, rank, "tp")

    def kv_heads_of(self, rank: int) -> range:
        """The key/value heads that its query heads read: one that is read by several ranks is held by each of them."""
        mine = self.heads_of(rank)
        return (
            range(self._kv_head(mine.start), self._kv_head(mine.stop - 1) + 1) if mine and self.kv_heads else range(0)
        )

    def experts_of(self, rank: int) -> range:
        """The experts that a rank has."""
        return _chunk(self.experts, self.on, rank, "ep")

    def layers_of(self, rank: int) -> tuple[int, ...]:
        """The layers that a rank has."""
        return tuple(self.stages[self.on.at(rank, "pp")]) if self.stages else ()

    def samples_of(self, rank: int) -> tuple[int, ...]:
        """The samples that a rank trains on."""
        if not self.dealt:
            return tuple(_chunk(self.samples, self.on, rank, "dp"))
        return tuple(sorted(sample for sample, dp in self.dealt.items() if dp == self.on.at(rank, "dp")))

    def _kv_head(self, head: int) -> int:
        return head * self.kv_heads // self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One element to find. What is None is left open: any sample, any token."""

    sample: int | None = None
    token: int | None = None  # of the sample
    head: int | None = None  # a query head
    layer: int | None = None
    expert: int | None = None
    row: Slices | None = (
        None  # the packed row that the token is in; its degrees are those of the job, whatever they say
    )
    place: int = 0  # of the sample in that row


Where = Literal["residual", "projections", "attention", "experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Who holds it, at one point of a layer.

    residual: in norms and between blocks, where Megatron's sequence parallelism cuts tokens over tp; projections: q, k, v
    and their weights, heads over tp; attention: between the exchanges of Ulysses, tokens traded for heads; experts: where
    an expert's weights are, and the tokens that are sent to it.
    """

    where: Where
    ranks: tuple[int, ...]
    index: int | None = None  # of the token in these ranks' piece of the packed row


def find(layout: Layout, asked: Asked) -> tuple[Found, ...]:
    """Which ranks hold it. Two places where attention is elsewhere than the projections before it.

    Raises BadInput for what the job does not have, naming what there is.
    """
    on = layout.on
    fixed: dict[str, Iterable[int]] = {}
    if asked.sample is not None:
        fixed["dp"] = (_dp_of(layout, asked.sample),)
    if asked.layer is not None:
        _check("layer", asked.layer, layout.layers)
        fixed["pp"] = tuple(at for at, layers in enumerate(layout.stages) if asked.layer in layers)
    if asked.expert is not None:
        _check("expert", asked.expert, layout.experts)
    places = _residual(layout, asked) if asked.head is None else _by_head(layout, asked)
    if asked.expert is None:
        return tuple(Found(where=where, ranks=on.ranks({**fixed, **along}), index=at) for where, along, at in places)
    ep = _place(asked.expert, layout.experts, on.degree("ep"))
    if asked.sample is None:
        held = [(where, on.ranks({**fixed, **along, "ep": (ep,)})) for where, along, _ in places]
    else:  # of the ranks that have the sample the expert may be on none: its tokens travel there, within their ep groups
        held = [(where, _travelled(on, on.ranks({**fixed, **along}), ep)) for where, along, _ in places]
    return tuple(Found(where="experts" if where == "residual" else where, ranks=ranks) for where, ranks in held)


Placed = tuple[Where, dict[str, Iterable[int]], int | None]


def _travelled(on: Mesh, ranks: Iterable[int], ep: int) -> tuple[int, ...]:
    """Where tokens of these ranks meet an expert: at this place of their ep groups, on all ranks that cut the expert."""
    there = (on.group("ep", rank)[ep] for rank in ranks)
    return tuple(sorted({rank for one in dict.fromkeys(there) for rank in on.group("etp", one)}))


def _residual(layout: Layout, asked: Asked) -> list[Placed]:
    if asked.token is None:
        return [("residual", {}, None)]
    tp = layout.on.degree("tp") if layout.sequence_parallel else 1
    spot = _row(layout, asked, tp).spot(asked.place, asked.token)
    along = {"tp": (spot.tp,)} if layout.sequence_parallel else {}
    return [("residual", {"cp": (spot.cp,), "sp": (spot.sp,), **along}, spot.index)]


def _by_head(layout: Layout, asked: Asked) -> list[Placed]:
    """Where a head is projected, and where it attends if that is elsewhere."""
    on, head = layout.on, asked.head or 0
    _check("head", head, layout.heads)
    tp = _place(head, layout.heads, on.degree("tp"))
    first, last = cut((0, layout.heads), on.degree("tp"), tp)
    spot = None if asked.token is None else _row(layout, asked, 1).spot(asked.place, asked.token)
    tokens = {"cp": (spot.cp,), "sp": (spot.sp,)} if spot else {}
    found: list[Placed] = [("projections", {"tp": (tp,), **tokens}, spot.index if spot else None)]
    exchanged = "tokens" if layout.cp_kind == "all_to_all" else "sp"
    if on.degree(exchanged) > 1:
        at = _place(head - first, last - first, on.degree(exchanged))
        ring = {"cp": (spot.cp,)} if spot and exchanged == "sp" else {}
        found.append(("attention", {"tp": (tp,), exchanged: (at,), **ring}, None))
    return found


def _row(layout: Layout, asked: Asked, tp: int) -> Slices:
    """The row that a token is in, cut over the job's axes."""
    if asked.row is None:
        raise BadInput("a token is found in its sample: say which sample")
    on = layout.on
    if asked.token is not None and not 0 <= asked.token < asked.row.lengths[asked.place]:
        _check("token", asked.token, asked.row.lengths[asked.place])
    return replace(asked.row, cp=on.degree("cp"), sp=on.degree("sp"), tp=tp)


def _dp_of(layout: Layout, sample: int) -> int:
    if layout.dealt:
        if sample not in layout.dealt:
            raise BadInput(f"sample {sample} was not trained on; {_range(sorted(layout.dealt))} were")
        return layout.dealt[sample]
    _check("sample", sample, layout.samples)
    return _place(sample, layout.samples, layout.on.degree("dp"))


def _check(word: str, number: int, count: int) -> None:
    if not count:
        raise BadInput(f"{word} {number}: how many there are is not known here")
    if not 0 <= number < count:
        raise BadInput(f"{word} {number} is not there; they run from 0 to {count - 1}")


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}"


def _place(index: int, size: int, degree: int) -> int:
    """The position that holds an index of a chunk cut."""
    return index // -(-size // degree)


def _chunk(size: int, on: Mesh, rank: int, axis: str) -> range:
    return range(*cut((0, size), on.degree(axis), on.at(rank, axis)))
