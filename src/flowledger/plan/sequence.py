"""How one configuration cuts sequences, and how it would by the other schemes: degrees, names of sizes, local shapes.

A scheme that the configuration uses is taken as it stands there; one that it does not use takes the place of those that it
does, at a degree that can be compared. Expressions over the names stand in tables/operators.toml.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowledger.flow.slices import Piece, Slices
from flowledger.plan.arithmetic import integer
from flowledger.plan.job import ITEMSIZE, Job
from flowledger.tables.models import Architecture
from flowledger.tables.operators import Scheme, points, schemes

# Degrees of axes, and what follows from how they cut: msp = tp under Megatron's sequence parallelism, ring = cp where keys
# and values go round, cpa = cp where heads are exchanged, etp: ranks that share an expert.
Degrees = Mapping[str, int]
ONES: Degrees = dict.fromkeys(("tp", "sp", "cp", "ep", "etp", "msp", "ring", "cpa"), 1)

# Scheme -> the degrees that it sets, at a degree of its own.
SETS: Mapping[str, Callable[[int], Degrees]] = {
    "megatron_sp": lambda degree: {"tp": degree, "msp": degree},
    "ulysses": lambda degree: {"sp": degree},
    "cp_ring": lambda degree: {"cp": degree, "ring": degree},
    "cp_all_to_all": lambda degree: {"cp": degree, "cpa": degree},
    "tp": lambda degree: {"tp": degree},
}
# Scheme -> the degree that says whether a configuration uses it; plain tp is what tp is without sequence parallelism.
TELLS = {"megatron_sp": "msp", "ulysses": "sp", "cp_ring": "ring", "cp_all_to_all": "cpa", "tp": "tp"}


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
        """This scheme and no other axis; experts are cut as tp has them."""
        etp = self.degrees["etp"] if self.scheme.axis == "tp" else 1
        return {**ONES, **SETS[self.scheme.name](self.degree), "etp": etp}


def degrees_here(job: Job) -> Degrees:
    """The degrees of the configuration. Megatron cuts each expert over tp ranks where nothing else is said."""
    mesh = job.mesh
    ring = mesh.cp_kind == "ring"
    cut_experts = job.architecture.moe is not None and maker(job) == "megatron"
    return {
        "tp": mesh.tp, "sp": mesh.sp, "cp": mesh.cp, "ep": mesh.ep, "etp": (mesh.etp or mesh.tp) if cut_experts else 1,
        "msp": mesh.tp if job.engine.sequence_parallel else 1,
        "ring": mesh.cp if ring else 1, "cpa": 1 if ring else mesh.cp,
    }  # fmt: skip


def maker(job: Job) -> str:
    """Whose code sends: megatron (with Transformer Engine), torch (FSDP2, DTensor), or the loop of flowledger."""
    return "flowledger" if job.own_loop else "megatron" if job.engine.strategy == "megatron" else "torch"


def cuts(job: Job) -> tuple[Cut, ...]:
    """Every scheme: as the configuration has it, or in the place of what it has; plain tp only where that is all tp does."""
    here = degrees_here(job)
    made = (_cut(scheme, here, job) for scheme in schemes())
    return tuple(cut for cut in made if cut.used or cut.scheme.name != "tp")


def _cut(scheme: Scheme, here: Degrees, job: Job) -> Cut:
    degree = here[TELLS[scheme.name]]
    if degree > 1 and not (scheme.name == "tp" and here["msp"] > 1):
        return Cut(scheme=scheme, degree=degree, used=True, degrees=here)
    rest: Degrees = {**here, "sp": 1, "cp": 1, "ring": 1, "cpa": 1}
    if scheme.axis == "tp":
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
    samples, each, pairs = _samples(job)
    tokens = (
        samples * each if job.beside_tokens and degrees["cp"] > 1 else job.tokens
    )  # cp cuts samples: none shares a prompt
    rows = {"B": 1, "S": tokens} if job.engine.packed else {"B": samples, "S": -(-tokens // samples)}
    projected = -(-tokens // (degrees["cp"] * degrees["sp"]))
    between = -(-projected // degrees["msp"])
    asked_for = tokens if job.logit_tokens is None else job.logit_tokens
    return {
        **degrees, **rows, **_sizes(job.architecture), **_widths(job.architecture, degrees),
        "n": samples, "s": each, "pairs": pairs if tokens == job.tokens else samples * causal(each), "t": projected, "x": between,
        "m": between if maker(job) == "megatron" else projected,  # elsewhere each tp rank has its experts whole
        "T_logit": min(asked_for, tokens), "t_logit": min(asked_for, projected), "responses": asked_for,
        "blocks": _blocks(job, degrees["ring"]), "e": ITEMSIZE[job.engine.compute_dtype or job.engine.param_dtype],
    }  # fmt: skip


def causal(tokens: float) -> float:
    """Pairs of a query and a key of one sample under a causal mask."""
    return tokens * (tokens + 1) / 2


def _samples(job: Job) -> tuple[int, int, float]:
    """Samples of the micro-batch, tokens of each, and all pairs of a query and a key that it sees, under a causal mask.

    Samples that share their prompt have it once in the row, and attend to it all the same: of their pairs only those within
    the prompt are not computed again.
    """
    samples = max(1, job.sequences)
    each = -(-job.tokens // samples)
    if not job.beside_tokens:
        return samples, each, samples * causal(each)
    each = max(each, job.longest)
    sharing = job.beside_tokens / each  # samples whose prompt is there already
    prompt = min(each, (samples * each - job.tokens) / sharing)
    return samples, each, samples * causal(each) - sharing * causal(prompt)


def _blocks(job: Job, ring: int) -> int:
    """Blocks of keys and values that a rank has at once in a ring: the own one, the one at hand, the one that arrives.

    This loop copies its own before it sends; Transformer Engine lets go of none before the last.
    """
    return 1 if ring == 1 else {"flowledger": 3, "torch": min(ring, 3), "megatron": ring}[maker(job)]


def _sizes(model: Architecture) -> dict[str, int]:
    moe = model.moe
    width = model.mla.qk_nope + model.mla.qk_rope if model.mla else model.head_dim
    return {
        "H": model.hidden, "A": model.heads, "K": model.heads if model.mla else model.kv_heads, "D": width,
        "F": moe.ffn if moe else model.ffn, "V": model.vocab, "E": moe.experts if moe else 1, "topk": moe.topk if moe else 1,
        "branches": model.branches, "norms": model.norms_per_layer, "qk_norms": int(model.qk_norm == "head"),
    }  # fmt: skip


def _widths(model: Architecture, degrees: Degrees) -> dict[str, float]:
    """Heads of keys, and elements of one token on one rank: at the projections, in the attention core, as they are exchanged."""
    size = _sizes(model)
    value = model.mla.v if model.mla else model.head_dim
    heads, exchanged = max(1, size["K"] // degrees["tp"]), degrees["sp"] * degrees["cpa"]
    sent = math.lcm(heads, exchanged)  # repeated until each rank gets equally many
    queries, output, both = model.query_width / degrees["tp"], model.heads * value / degrees["tp"], size["D"] + value
    return {
        "q_w": queries, "o_w": output, "kv_w": heads * both, "kv_sent": sent * both, "k_heads": heads,
        "q_core": queries / exchanged, "o_core": output / exchanged, "kv_core": sent // exchanged * both,
        "k_core": sent // exchanged,
    }  # fmt: skip


def asked(needs: str, job: Job) -> bool:
    """Whether a row of the table is about this model and this pipeline stage."""
    stages = {"first": job.pp_rank == 0, "last": job.pp_rank == job.mesh.pp - 1}
    moe = job.architecture.moe is not None
    return {"": True, "moe": moe, "dense": not moe, **stages}[needs]


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
    """`B, S/(cp*sp), max(1, K/tp), D` at the commas outside parentheses."""
    depth, part = 0, ""
    for char in dims:
        depth += (char == "(") - (char == ")")
        if char == "," and not depth:
            yield part.strip()
            part = ""
        else:
            part += char
    yield part.strip()


def held(job: Job, degrees: Degrees) -> dict[str, Any]:
    """What a rank has of a micro-batch at these degrees: counts, and the tokens of the samples that first and last rank have.

    Megatron SP and Ulysses cut a packed row, which leaves whole samples on some ranks; only cp cuts each sample. A padded
    sample is a row by itself.
    """
    bound = names(job, degrees)
    own = _own(job, bound) if job.engine.packed else [range(bound["s"])]
    row = Slices(lengths=tuple(map(len, own)), cp=degrees["cp"], sp=degrees["sp"], tp=degrees["msp"])
    first, last = row.of_rank(), row.of_rank(cp=row.cp - 1, sp=row.sp - 1, tp=row.tp - 1)
    keys = bound["B"] * bound["S"] / bound["ring"] * bound["kv_core"] * bound["e"] * bound["blocks"]
    return {
        "sample_tokens": bound["s"], "row_tokens": bound["B"] * bound["S"], "samples": bound["n"],
        "first_rank": _runs(first, own, bound["B"]), "last_rank": _runs(last, own, bound["B"]), "rank_tokens": bound["x"],
        "core_heads": integer("A/(tp*sp*cpa)", bound), "core_kv_heads": bound["k_core"],
        "core_tokens": integer("S/ring", bound), "kv_bytes": math.ceil(keys),
        "residual_bytes": bound["x"] * bound["H"] * bound["e"],
    }  # fmt: skip


def _own(job: Job, bound: Mapping[str, Any]) -> list[range]:
    """The positions that each sample has for itself in a packed row. Neighbours share a prompt, but not under cp."""
    samples, each = bound["n"], bound["s"]
    sharing = min(samples - 1, job.beside_tokens // each)
    if not sharing or bound["cp"] > 1:
        less, more = divmod(bound["S"], samples)
        return [range(less + (index < more)) for index in range(samples)]
    prompts = samples - sharing
    prompt = each - (bound["S"] - prompts * each) // sharing
    leads = [index * prompts // samples for index in range(samples)]  # the prompt of each
    return [range(prompt if index and leads[index] == leads[index - 1] else 0, each) for index in range(samples)]


def _runs(pieces: Sequence[Piece], own: Sequence[range], rows: int) -> list[dict[str, list[Any]]]:
    """Runs of positions, first and last, of samples that a rank has; neighbours of which it has the same stand together."""
    mine: dict[int, list[list[int]]] = {}
    for piece in pieces:
        positions = own[piece.sample][piece.start : piece.stop] if piece.sample < len(own) else range(0)
        if positions:  # the rest is filling
            mine.setdefault(piece.sample, []).append([positions[0], positions[-1]])
    found: list[dict[str, list[Any]]] = []
    for sample, runs in mine.items():
        if found and found[-1]["runs"] == runs:
            found[-1]["samples"][1] = sample
        else:
            found.append({"samples": [sample, sample], "runs": runs})
    return [{**one, "samples": [0, rows - 1]} for one in found] if rows > 1 else found
