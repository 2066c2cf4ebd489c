"""How one configuration cuts sequences, and how it would by the other schemes: degrees, names of sizes, local shapes.

A scheme that the configuration uses is taken as it stands there; one that it does not use takes the place of those that it
does, at a degree that can be compared. Expressions over the names stand in tables/operators.toml.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flowledger.flow.slices import Slices
from flowledger.plan.arithmetic import integer
from flowledger.plan.job import ITEMSIZE, Job
from flowledger.tables.models import Architecture
from flowledger.tables.operators import Scheme, points, schemes

# Degrees of axes, and what follows from how they cut: msp = tp under Megatron's sequence parallelism, ring = cp where keys
# and values go round, cpa = cp where heads are exchanged.
Degrees = Mapping[str, int]
ONES: Degrees = dict.fromkeys(("tp", "sp", "cp", "ep", "msp", "ring", "cpa"), 1)

# Scheme -> the degrees that it sets, at a degree of its own.
SETS: Mapping[str, Callable[[int], Degrees]] = {
    "megatron_sp": lambda degree: {"tp": degree, "msp": degree},
    "ulysses": lambda degree: {"sp": degree},
    "cp_ring": lambda degree: {"cp": degree, "ring": degree},
    "cp_all_to_all": lambda degree: {"cp": degree, "cpa": degree},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One scheme in this configuration."""

    scheme: Scheme
    degree: int  # 1: no degree divides the heads
    used: bool  # by the configuration; else taken for comparison
    degrees: Degrees  # of all axes, with this scheme in place

    @property
    def runs(self) -> bool:
        return self.degree > 1

    @property
    def alone(self) -> Degrees:
        """This scheme and no other axis."""
        return {**ONES, **SETS[self.scheme.name](self.degree)}


def degrees_here(job: Job) -> Degrees:
    """The degrees of the configuration."""
    mesh = job.mesh
    ring = mesh.cp_kind == "ring"
    return {
        "tp": mesh.tp, "sp": mesh.sp, "cp": mesh.cp, "ep": mesh.ep, "msp": mesh.tp if job.engine.sequence_parallel else 1,
        "ring": mesh.cp if ring else 1, "cpa": 1 if ring else mesh.cp,
    }  # fmt: skip


def cuts(job: Job) -> tuple[Cut, ...]:
    """Every scheme: as the configuration has it, or in the place of what it has."""
    here = degrees_here(job)
    return tuple(_cut(scheme, here, job) for scheme in schemes())


def _cut(scheme: Scheme, here: Degrees, job: Job) -> Cut:
    key = {"megatron_sp": "msp", "ulysses": "sp", "cp_ring": "ring", "cp_all_to_all": "cpa"}[scheme.name]
    if here[key] > 1:
        return Cut(scheme=scheme, degree=here[key], used=True, degrees=here)
    rest: Degrees = {**here, "sp": 1, "cp": 1, "ring": 1, "cpa": 1}
    if scheme.name == "megatron_sp":
        degree = here["tp"] if here["tp"] > 1 else math.gcd(_comparable(here, job), job.architecture.heads)
        rest = here if here["tp"] > 1 else rest
    else:
        heads = max(1, job.architecture.heads // here["tp"])
        degree = _comparable(here, job)
        degree = degree if scheme.name == "cp_ring" else math.gcd(degree, heads)
    return Cut(scheme=scheme, degree=degree, used=False, degrees={**rest, **SETS[scheme.name](degree)})


def _comparable(here: Degrees, job: Job) -> int:
    """The degree at which a sequence is cut here; where it is not, the ranks of a node."""
    return (
        here["cp"] * here["sp"] if here["cp"] * here["sp"] > 1 else here["msp"] if here["msp"] > 1
        else max(2, math.gcd(job.world, job.gpus_per_node))
    )  # fmt: skip


def names(job: Job, degrees: Degrees) -> dict[str, Any]:
    """Every name that expressions of the table use, for these degrees."""
    samples = max(1, job.sequences)
    rows = {"B": 1, "S": job.tokens} if job.engine.packed else {"B": samples, "S": -(-job.tokens // samples)}
    projected = -(-job.tokens // (degrees["cp"] * degrees["sp"]))
    return {
        **degrees, **rows, **_sizes(job.architecture), **_widths(job.architecture, degrees),
        "n": samples, "s": -(-job.tokens // samples), "t": projected, "x": -(-projected // degrees["msp"]),
        "e": ITEMSIZE[job.engine.compute_dtype or job.engine.param_dtype],
    }  # fmt: skip


def _sizes(model: Architecture) -> dict[str, int]:
    moe = model.moe
    width = model.mla.qk_nope + model.mla.qk_rope if model.mla else model.head_dim
    return {
        "H": model.hidden, "A": model.heads, "K": model.heads if model.mla else model.kv_heads, "D": width,
        "F": moe.ffn if moe else model.ffn, "V": model.vocab, "E": moe.experts if moe else 1, "topk": moe.topk if moe else 1,
        "branches": model.branches, "norms": model.norms_per_layer,
    }  # fmt: skip


def _widths(model: Architecture, degrees: Degrees) -> dict[str, float]:
    """Elements of one token on one rank: at the projections, inside the attention core, and as they are exchanged."""
    size = _sizes(model)
    value = model.mla.v if model.mla else model.head_dim
    kv_heads, exchanged = max(1.0, size["K"] / degrees["tp"]), degrees["sp"] * degrees["cpa"]
    queries, output, both = model.query_width / degrees["tp"], model.heads * value / degrees["tp"], size["D"] + value
    return {
        "q_w": queries, "o_w": output, "kv_w": kv_heads * both,
        "q_core": queries / exchanged, "o_core": output / exchanged, "kv_core": max(1.0, kv_heads / exchanged) * both,
        "kv_sent": max(kv_heads, exchanged) * both,
    }  # fmt: skip


def asked(needs: str, job: Job) -> bool:
    """Whether a row of the table is about this model: some are of dense layers or of mixtures of experts only."""
    return not needs or (needs == "moe") == (job.architecture.moe is not None)


def shapes(job: Job, made: tuple[Cut, ...]) -> list[dict[str, Any]]:
    """One row a point of a layer: whole, on one rank of this configuration, and under each scheme alone."""
    here = names(job, degrees_here(job))
    alone = {cut.scheme.name: names(job, cut.alone) for cut in made if cut.runs}
    return [
        {
            "point": point.name, "point_zh": point.zh, "dims": f"[{point.logical}]", "local_dims": f"[{point.local}]",
            "logical_shape": _shape(point.logical, here), "local_shape": _shape(point.local, here),
            **{name: _shape(point.local, bound) for name, bound in alone.items()},
        }
        for point in points()
        if asked(point.needs, job)
    ]  # fmt: skip


def _shape(dims: str, bound: Mapping[str, Any]) -> list[int]:
    return [integer(dim, bound) for dim in _split(dims)]


def _split(dims: str) -> Iterator[str]:
    """`B, S/ring, max(1, K/tp), D` at the commas outside parentheses."""
    depth, part = 0, ""
    for char in dims:
        depth += (char == "(") - (char == ")")
        if char == "," and not depth:
            yield part.strip()
            part = ""
        else:
            part += char
    yield part.strip()


def held(job: Job, cut: Cut) -> dict[str, Any]:
    """What a rank has of one sample and of its keys, the scheme alone: counts, and the tokens of first and last rank."""
    bound = names(job, cut.alone)
    first, last = _pieces(bound["s"], cut, 0), _pieces(bound["s"], cut, cut.degree - 1)
    blocks = 2 if cut.scheme.name == "cp_ring" else 1
    keys = bound["B"] * bound["S"] / bound["ring"] * bound["kv_core"] * bound["e"] * blocks
    return {
        "sample_tokens": bound["s"], "first_rank": first, "last_rank": last, "rank_tokens": bound["x"],
        "core_heads": integer("A/(tp*sp*cpa)", bound), "core_kv_heads": integer("max(1, K/(tp*sp*cpa))", bound),
        "core_tokens": integer("S/ring", bound), "kv_bytes": math.ceil(keys),
        "residual_bytes": bound["x"] * bound["H"] * bound["e"],
    }  # fmt: skip


def _pieces(length: int, cut: Cut, rank: int) -> list[list[int]]:
    """[first, last] of each run of positions that a rank has of a sample of that length between the blocks."""
    alone = cut.alone
    axis = {"megatron_sp": "tp", "ulysses": "sp"}.get(cut.scheme.name, "cp")
    row = Slices(lengths=(length,), cp=alone["cp"], sp=alone["sp"], tp=alone["msp"])
    runs = row.of_rank(**{axis: rank})
    return [[piece.start, min(piece.stop, length) - 1] for piece in runs if piece.sample == 0 and piece.start < length]
