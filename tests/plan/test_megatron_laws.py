"""What must hold of a Megatron plan whatever the model: nothing is lost between ranks, and more work never takes less."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.config.engine import Engine, Mesh, Recompute
from flowledger.plan.job import Job
from flowledger.plan.megatron import timeline as megatron
from flowledger.plan.megatron.flags import MegatronFlags
from flowledger.plan.megatron.rank import Held, Rank, rank_of
from flowledger.tables.models import Architecture, Mla, Moe

FLAGS = MegatronFlags()
SIZES = st.fixed_dictionaries(
    {"layers": st.sampled_from((8, 16, 24)), "kv_heads": st.sampled_from((4, 8)), "tied": st.booleans()}
)
KINDS = st.sampled_from(("dense", "moe", "mla"))


def model(kind: str = "dense", **change: Any) -> Architecture:
    moe = Moe(experts=16, topk=2, ffn=512, shared_ffn=1024, dense=(0,))
    kinds: dict[str, dict[str, Any]] = {
        "dense": {},
        "moe": {"moe": moe},
        "mla": {"moe": moe, "mla": Mla(q_lora=384, kv_lora=128, qk_nope=64, qk_rope=32, v=64)},
    }
    plain = Architecture(
        name=kind, layers=8, hidden=1024, heads=8, kv_heads=8, head_dim=128, ffn=4096, vocab=65536, tied=False
    )
    return replace(plain, **{**kinds[kind], **change})


def job(architecture: Architecture, mesh: Mesh, *, tokens: int = 8192, **change: Any) -> Job:
    engine = Engine(
        strategy="megatron", mesh=mesh, param_dtype="bfloat16", grad_dtype="float32", sequence_parallel=mesh.tp > 1,
        kernels="te", distributed_optimizer=True, **change,
    )  # fmt: skip
    return Job(
        architecture=architecture, engine=engine, world=64, device="H100", sequences=2, tokens=tokens, longest=tokens // 2,
        micro_batches=16,
    )  # fmt: skip


def ranks(one: Job) -> list[Rank]:
    return [rank_of(replace(one, pp_rank=index), FLAGS) for index in range(one.mesh.pp)]


def peak(one: Job) -> int:
    return megatron.timeline(one).peak().bytes


def numel(held: tuple[Held, ...], part: str | None = None) -> int:
    return sum(one.total for one in held if part in (None, one.part))


def parameters(arch: Architecture) -> int:
    """Counted by hand from the papers' matrices: attention (or MLA), SwiGLU feed-forward or experts, norms, vocabulary."""
    h, moe, mla = arch.hidden, arch.moe, arch.mla
    wide = arch.heads * arch.head_dim
    attention = h * (2 * wide + 2 * arch.kv_heads * arch.head_dim)
    if mla is not None:
        each = mla.qk_nope + mla.qk_rope
        assert mla.q_lora is not None
        attention = h * mla.q_lora + mla.q_lora * (1 + arch.heads * each) + h * (mla.kv_lora + mla.qk_rope)
        attention += mla.kv_lora * (1 + arch.heads * (mla.qk_nope + mla.v)) + arch.heads * mla.v * h
    sparse = 3 * h * (moe.experts * moe.ffn + moe.shared_ffn) + h * moe.experts if moe else 0
    dense = arch.layers if moe is None else len(moe.dense)
    feed_forward = dense * 3 * h * arch.ffn + (arch.layers - dense) * sparse
    return arch.layers * (attention + 2 * h) + feed_forward + h + arch.vocab * h * (1 if arch.tied else 2)


@settings(max_examples=40, deadline=None)
@given(kind=KINDS, sizes=SIZES, pp=st.sampled_from((1, 2, 4)), vpp=st.sampled_from((1, 2)), ep=st.sampled_from((1, 4)))
def test_the_ranks_together_hold_the_model(kind: str, sizes: dict[str, Any], pp: int, vpp: int, ep: int) -> None:
    arch = model(kind, **sizes)
    every = ranks(job(arch, Mesh(pp=pp, vpp=vpp if pp > 1 else 1, ep=ep, etp=1)))
    whole = sum(one.total * (ep if one.expert else 1) for rank in every for one in rank.held)
    again = arch.vocab * arch.hidden if arch.tied and pp > 1 else 0  # a tied embedding lies on both ends
    assert whole == parameters(arch) + again
    assert sorted(layer for rank in every for chunk in rank.chunks for layer in chunk) == list(range(arch.layers))


@given(kind=KINDS, tp=st.sampled_from((2, 4)))
def test_tensor_parallelism_cuts_matrices_and_leaves_norms_whole(kind: str, tp: int) -> None:
    one, cut = (rank_of(job(model(kind), Mesh(tp=degree, etp=1)), FLAGS).held for degree in (1, tp))
    parts = ("embed", "head", "mlp", "shared_expert", *(() if kind == "mla" else ("attention",)))
    assert [numel(cut, part) * tp for part in parts] == [numel(one, part) for part in parts]
    assert [numel(cut, part) for part in ("norm", "router")] == [numel(one, part) for part in ("norm", "router")]
    assert numel(cut, "experts") == numel(one, "experts")  # etp is 1


@pytest.mark.parametrize("vpp", [1, 2])
def test_only_the_ends_hold_the_vocabulary(vpp: int) -> None:
    every = ranks(job(model(), Mesh(pp=4, vpp=vpp)))
    assert [numel(rank.held, "embed") > 0 for rank in every] == [True, False, False, False]
    assert [numel(rank.held, "head") > 0 for rank in every] == [False, False, False, True]
    names = [
        {live.name for live in megatron.timeline(rank.job).lives if live.kind == "temporary" and live.name == "logits"}
        for rank in every
    ]
    assert names == [set(), set(), set(), {"logits"}]


@settings(max_examples=30, deadline=None)
@given(kind=KINDS, pp=st.sampled_from((1, 2, 4)), tokens=st.sampled_from((2048, 4096, 8192)), data=st.data())
def test_more_tokens_or_layers_never_take_less(kind: str, pp: int, tokens: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, pp - 1))
    full = Recompute(granularity="full", method="uniform", layers=1)
    plan = data.draw(st.sampled_from((Recompute(), full)))

    def at(tokens: int, layers: int) -> int:
        one = job(model(kind, layers=layers), Mesh(pp=pp, ep=4, etp=1), tokens=tokens, recompute=plan)
        return peak(replace(one, pp_rank=index))

    assert at(tokens, 8) < at(2 * tokens, 8)
    assert at(tokens, 8) < at(tokens, 16)


@settings(max_examples=20, deadline=None)
@given(kind=KINDS, pp=st.sampled_from((1, 2)), data=st.data())
def test_recomputing_never_takes_more_and_a_pass_without_gradients_least(
    kind: str, pp: int, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, pp - 1))
    full = Recompute(granularity="full", method="uniform", layers=1)
    modules = Recompute(granularity="selective", modules=("mlp", "moe_act", "layernorm", "mla_up_proj"))
    none, some, whole = (
        replace(job(model(kind), Mesh(pp=pp, ep=4, etp=1), recompute=plan), pp_rank=index)
        for plan in (Recompute(), modules, full)
    )
    assert peak(replace(none, gradients=False)) < peak(whole) < peak(some) < peak(none)


def test_interleaving_costs_the_first_stage_what_the_paper_says() -> None:
    """arXiv 2104.04473 section 2.2 and 2205.05198: activations of 1 + (p - 1)/(p v) times those of p micro-batches."""

    def kept(vpp: int) -> int:
        lives = megatron.timeline(job(model(layers=16), Mesh(pp=4, vpp=vpp))).lives
        return sum(
            one.total
            for one in lives
            if one.kind == "activation" and one.label.startswith(("layer ", "micro-batches in flight"))
        )

    assert kept(2) / kept(1) == pytest.approx(1 + 3 / 8, rel=1e-6)
