"""The steps of one decoder layer in the order of the forward pass, each a module of tables/activations_hf.toml."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from flowledger.plan.fsdp.symbols import GATED, kernels
from flowledger.plan.job import Job
from flowledger.plan.saved import Kept, kept, rows


@dataclass(frozen=True, slots=True)
class Step:
    """One step: the module whose rows say what it keeps, and the symbols that differ here from those of the layer."""

    module: str
    name: str
    starts: bool = False  # reads the residual stream: a norm in front of a branch
    ends: bool = False  # writes it
    own: Mapping[str, object] = field(default_factory=dict)


def steps(job: Job, layer: int) -> list[Step]:
    """A pre-norm layer; sandwich norms and parallel branches where the architecture has them."""
    arch = job.architecture
    norm = "layernorm" if arch.norm == "layernorm" else "norm"
    sandwich = arch.norms_per_layer == 4
    found = [Step(norm, "norm 1", starts=True), *_attention(job, layer)]
    if sandwich:
        found.append(Step(norm, "norm after attention"))
    if not arch.parallel_residual:
        found += [Step("add", "residual 1", ends=True), Step(norm, "norm 2", starts=True)]
    elif arch.norms_per_layer > 1:
        found.append(Step(norm, "norm 2", starts=True))
    found += _feed_forward(job, layer)
    if sandwich:
        found.append(Step(norm, "norm after feed-forward"))
    return [*found, Step("add", "residual 2", ends=True)]


def _attention(job: Job, layer: int) -> Iterator[Step]:
    arch = job.architecture
    if arch.mla is not None:
        yield Step("mla", "projections")
    else:
        yield Step("qkv", "q, k, v")
        if arch.qk_norm != "none":
            yield Step("qk_norm", "norms of q and k")
        yield Step("rope", "rotation")
    yield Step("core", "attention")
    yield Step("o_proj", "output projection")


def _feed_forward(job: Job, layer: int) -> Iterator[Step]:
    arch = job.architecture
    if arch.moe is not None and arch.is_moe(layer):
        yield Step("router", "router")
        yield Step("experts", "experts")
        if arch.moe.shared_ffn:
            yield Step("shared", "shared expert")
    elif arch.mlp in GATED:
        for module in ("gate", "silu", "up", "product", "down"):
            yield Step(module, module)
    else:
        yield Step("plain_up", "up")
        yield Step("activation", "activation")
        yield Step("down", "down")


def kept_by(job: Job, step: Step, names: Mapping[str, object], flags: set[str], life: str, variant: str) -> list[Kept]:
    """The rows of this step: those of the variant (titan, compiled, …), else of the kernels, else of hf."""
    for source in (variant, kernels(job), "hf"):
        if source and knows(source, step.module):
            return kept(source, step.module, {**names, **step.own}, flags, life)
    return []


def knows(source: str, module: str) -> bool:
    """Whether this implementation has rows of its own for a module."""
    return (source, module) in _known()


@cache
def _known() -> frozenset[tuple[str, str]]:
    return frozenset((row.kernels, row.module) for row in rows())
