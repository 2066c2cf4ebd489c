"""Which tensor an allocation of so many bytes is: the forms of the flow, with the sizes that a run or a plan binds.

Every form is tried whose dimensions are bound, or all but the tokens of a micro-batch; these are known from the
configuration's limits or solved for. A match must be as exact as the number was printed.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple

from flowledger.diagnose.orders.shortage import Size
from flowledger.flow.dims import Dim, parse_shape
from flowledger.flow.tensors import tensors

# dtype -> bytes of an element, with what it is where the tensor's own dtype is another.
MODEL = (("bfloat16", 2), ("float32", 4))
FIXED = {"float32": 4, "int64": 8, "bool": 1}
COPIES = {1: "", 2: "two copies at once", 3: "three copies at once"}
TOKENS = frozenset({"T", "T_logit"})  # of a micro-batch: what data and budgets decide
LARGEST_FIRST = ("logits", "hidden_states", "activations", "kv_cache", "params", "grads", "optimizer_state")
FEWEST, MANY = 64, 1 << 20  # tokens of a micro-batch that make sense
PRECISE = 2e-3  # relative: rounding up to whole blocks and tiles


class Match(NamedTuple):
    """One tensor that has this size."""

    tensor: str
    dims: str
    sizes: tuple[int, ...]
    dtype: str
    copies: int
    solved: int | None  # tokens that were worked out of the size, where none was known
    error: float  # relative, to the size as it was printed
    exact: bool  # within what was printed

    @property
    def formula(self) -> str:
        """`102,742 tokens * 151,936 * 4 bytes`."""
        factors = [f"{size:,}" for size in self.sizes]
        width = dict((*MODEL, *FIXED.items()))[self.dtype]
        return " * ".join([*factors, f"{width} bytes", *([f"{self.copies} copies"] if self.copies > 1 else [])])

    def sentence(self) -> str:
        note = "; ".join(filter(None, (self._upcast, COPIES[self.copies])))
        about = f" ({note})" if note else ""
        return f"{self.tensor} [{self.dims}] in {self.dtype}{about}: {self.formula}"

    @property
    def bytes(self) -> int:
        return prod(self.sizes) * dict((*MODEL, *FIXED.items()))[self.dtype] * self.copies

    @property
    def _upcast(self) -> str:
        return "raised to float32" if self.dtype == "float32" and tensors()[self.tensor].dtype == "model" else ""


def tensors_of(
    size: Size, sizes: Mapping[str, int], tokens: Iterable[int], *, degrees: Mapping[str, int], stage: str | None = None,
    most_tokens: int | None = None, planned: Collection[tuple[str, tuple[int, ...]]] = (),
) -> list[Match]:  # fmt: skip
    """What an allocation may be, the likeliest first; empty where nothing fits.

    sizes: symbols of the configuration; tokens: counts that micro-batches have or may have; degrees: of the mesh;
    stage: where it was asked for, whose tensors come first; most_tokens: beyond which solved counts make no sense;
    planned: tensors with the shapes that one rank has of them there by the plan, which come before all other readings.
    """
    known = sorted({count for count in tokens if count > 1}, reverse=True)
    found = [*_tried(size, sizes, known, degrees, most_tokens)]
    return sorted(found, key=lambda match: ((match.tensor, match.sizes) not in planned, *_rank(match, stage)))


def _rank(match: Match, stage: str | None) -> tuple[bool, bool, bool, int, int, bool, float]:
    row = tensors()[match.tensor]
    places = {place.partition("/")[0] for place in (*row.written_by, *row.readers)}
    order = LARGEST_FIRST.index(match.tensor) if match.tensor in LARGEST_FIRST else len(LARGEST_FIRST)
    solved = match.solved is not None
    return (
        solved,
        stage is not None and stage not in places,
        not match.exact,
        match.copies,
        order,
        solved and match.dtype != "float32",
        match.error,
    )


def _tried(
    size: Size, sizes: Mapping[str, int], known: list[int], degrees: Mapping[str, int], most: int | None
) -> Iterator[Match]:
    slack = max(size.within / size.bytes, PRECISE)
    for name, dims, placement in _forms():
        free = [dim for dim in dims if not dim.symbols <= sizes.keys()]
        if any(dim.symbols - TOKENS for dim in free) or len(free) > 1:
            continue
        fixed = prod(_local(dim, at, sizes, placement, degrees) for at, dim in enumerate(dims) if dim not in free)
        dtype = tensors()[name].dtype
        for kind, width in MODEL if dtype == "model" else ((dtype, FIXED.get(dtype, 4)),):
            for copies in COPIES:
                each = fixed * width * copies
                counts = known if free else [1]
                text = ", ".join(dim.text for dim in dims)
                hits = [
                    (count, abs(each * count / size.bytes - 1)) for count in counts if abs(each * count / size.bytes - 1) <= slack
                ]  # fmt: skip
                for count, error in sorted(hits, key=lambda hit: hit[1])[:1]:
                    local = _shape(dims, free, count, sizes, placement, degrees)
                    yield Match(name, text, local, kind, copies, None, error, error <= size.within / size.bytes)
                if name == "logits" and free and not hits and copies == 1:
                    count = round(size.bytes / each)
                    if FEWEST <= count <= (most or MANY):
                        local = _shape(dims, free, count, sizes, placement, degrees)
                        yield Match(name, text, local, kind, copies, count, abs(each * count / size.bytes - 1), True)


def _forms() -> Iterator[tuple[str, tuple[Dim, ...], Mapping[str, str]]]:
    for name, row in tensors().items():
        for form in row.forms:
            if form.dims and not any("P" in dim.symbols for dim in form.dims):
                yield name, form.dims, row.placement_of(form)
    yield "params", parse_shape("[V, H]"), {"tp": "Shard(0)"}  # the embedding, and the head: the largest of most models


def _local(
    dim: Dim, at: int, sizes: Mapping[str, int], placement: Mapping[str, str], degrees: Mapping[str, int]
) -> int:
    """What one rank has of a dimension that is bound; tensor parallelism cuts it as the flow says."""
    cut = degrees.get("tp", 1) if placement.get("tp") == f"Shard({at})" else 1
    return max(1, -(-dim.resolve(sizes) // cut))


def _shape(
    dims: tuple[Dim, ...], free: list[Dim], count: int, sizes: Mapping[str, int], placement: Mapping[str, str],
    degrees: Mapping[str, int],
) -> tuple[int, ...]:  # fmt: skip
    return tuple(count if dim in free else _local(dim, at, sizes, placement, degrees) for at, dim in enumerate(dims))
