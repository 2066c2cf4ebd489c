"""The parts of a Megatron plan: activation formulas of the papers, schedules, the allocator, workspaces."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.config.engine import Engine, Mesh
from flowledger.plan.job import Job
from flowledger.plan.megatron.allocator import SMALL, unsplit
from flowledger.plan.megatron.flags import MegatronFlags
from flowledger.plan.megatron.layers import backward, saved
from flowledger.plan.megatron.pipeline import in_flight
from flowledger.plan.megatron.rank import rank_of
from flowledger.plan.megatron.state import cublas_workspace, linear_shapes
from flowledger.plan.saved import total
from flowledger.tables.models import Architecture

S, B, H, A = 1024, 4, 512, 8
GPT = Architecture(
    name="gpt", layers=4, hidden=H, heads=A, kv_heads=A, head_dim=H // A, ffn=4 * H, vocab=50304, mlp="gelu",
    norm="layernorm", qkv_bias=True, o_bias=True, mlp_bias=True, positions="learned", max_positions=S,
)  # fmt: skip
OLD = MegatronFlags(hidden_dropout=True, attention_dropout=True, core="unfused")


def job(tp: int = 1, *, sp: bool = False, **change: Any) -> Job:
    engine = Engine(
        strategy="megatron", mesh=Mesh(tp=tp), param_dtype="bfloat16", grad_dtype="float32", sequence_parallel=sp,
        kernels="te", attention="flash", distributed_optimizer=False,
    )  # fmt: skip
    return Job(
        architecture=GPT, engine=engine, world=8, device="H100", sequences=B, tokens=B * S, longest=S, **change
    )  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_layer_keeps_what_the_paper_counts(tp: int) -> None:
    """arXiv 2205.05198 table 2: sbh(10 + 24/t + 5as/ht), and (34 + 5as/h)/t of it with sequence parallelism; statistics of the norms beside."""
    scores = 5 * A * S * S * B // tp
    sbh = S * B * H
    for sp, linear in ((False, 10 * sbh + 24 * sbh // tp), (True, 34 * sbh // tp)):
        rows = saved(rank_of(job(tp, sp=sp), OLD), 0)
        statistics = sum(one.bytes for one in rows if one.row.label.endswith("of each token"))
        assert total(rows) - statistics == linear + scores
        assert statistics == 16 * S * B // (tp if sp else 1)


def test_flash_attention_drops_the_scores() -> None:
    fused = saved(rank_of(job(), MegatronFlags(hidden_dropout=True)), 0)
    assert total(saved(rank_of(job(), OLD), 0)) - total(fused) == 5 * A * S * S * B - 4 * A * S * B


def test_flash_attention_2_keeps_its_output_twice() -> None:
    twice = total(saved(rank_of(job(), MegatronFlags(core="flash")), 0))
    assert twice - total(saved(rank_of(job(), MegatronFlags(core="fused")), 0)) == 2 * S * B * H


def test_torchs_softmax_of_a_float32_copy_keeps_four_bytes_a_score() -> None:
    def kept(*, wide: bool) -> int:
        return total(saved(rank_of(job(), MegatronFlags(core="unfused", softmax_float32=wide)), 0))

    assert kept(wide=True) - kept(wide=False) == 2 * A * S * S * B


def test_the_softmax_kernel_writes_its_gradient_in_place_and_dropout_does_not() -> None:
    def scores(*, dropout: bool) -> int:
        rows = backward(rank_of(job(), MegatronFlags(core="unfused", attention_dropout=dropout)), 0, False)
        return sum(one.bytes for one in rows if "scores" in one.row.label)

    assert (scores(dropout=False), scores(dropout=True)) == (2 * A * S * S * B, 4 * A * S * S * B)


@given(pp=st.integers(1, 16), micro=st.integers(1, 64), data=st.data())
def test_1f1b_has_as_many_in_flight_as_stages_behind(pp: int, micro: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, pp - 1))
    assert in_flight(pp, rank, 1, micro) == (min(micro, pp - rank),)


@given(pp=st.integers(2, 8), chunks=st.integers(2, 5), groups=st.integers(2, 5), data=st.data())
def test_interleaved_warm_up_is_that_of_the_paper(pp: int, chunks: int, groups: int, data: st.DataObject) -> None:
    """arXiv 2205.05198: the first stage holds 1 + (p - 1)/(p v) of p micro-batches of all its layers."""
    rank = data.draw(st.integers(0, pp - 1))
    micro = groups * pp
    held = in_flight(pp, rank, chunks, micro)
    assert sum(held) == min(micro * chunks, 2 * (pp - rank - 1) + (chunks - 1) * pp + 1)
    if rank == 0 and chunks * micro > 2 * (pp - 1) + (chunks - 1) * pp:
        assert sum(held) / chunks == pytest.approx(pp * (1 + (pp - 1) / (pp * chunks)))
    assert all(0 <= one <= micro for one in held)


def test_the_head_runs_with_its_own_chunk_in_flight() -> None:
    assert in_flight(4, 3, 3, 4, at_work=2) == (4, 4, 1)  # 4 + 4 warm-up forwards, then the first of the last chunk


@given(st.lists(st.integers(1, 40 * 2**20), max_size=40))
def test_rests_are_never_larger_than_a_small_block_each(sizes: list[int]) -> None:
    large = sum(-(-size // 512) * 512 > SMALL for size in sizes)
    assert 0 <= unsplit(sizes) <= large * SMALL


def test_a_rest_of_a_mebibyte_or_less_is_not_split_off() -> None:
    mib = 2**20
    assert unsplit([4 * mib] * 5) == 0  # five fill a segment of 20 MiB
    assert unsplit([3 * mib + mib // 2] * 6) == 0  # five leave 2.5 MiB, which can be split off
    assert unsplit([19 * mib // 5] * 5) == pytest.approx(mib, abs=4096)  # five leave 1 MiB, which cannot
    assert unsplit([19 * mib + mib // 2]) == mib // 2  # a segment of its own, up to a multiple of 2 MiB


@pytest.mark.parametrize(
    ("text", "device", "bytes_"),
    [
        (":4096:8", "A100", 32 * 2**20),
        (":4096:2:16:8", "H100", 8 * 2**20 + 128 * 2**10),
        ("", "H100", 32 * 2**20),
        ("", "A100", 8 * 2**20 + 128 * 2**10),
    ],
)
def test_cublas_workspaces_are_torchs(text: str, device: str, bytes_: int) -> None:
    """pytorch aten/src/ATen/cuda/CUDABlas.cpp; `:KiB:count` pairs as cuBLAS documents them."""
    environment = (("CUBLAS_WORKSPACE_CONFIG", text),) if text else ()
    one = Job(
        architecture=GPT,
        engine=Engine(),
        world=1,
        device=device,
        sequences=1,
        tokens=1,
        longest=1,
        environment=environment,
    )
    assert cublas_workspace(one) == bytes_


def test_dummy_gradients_of_a_70b_width_come_to_the_published_figure() -> None:
    """SimuMax v1.2: 1.59 GiB for Llama-3-70B's width at tp 1 (qkv, projection, gate‖up, down)."""
    from flowledger.tables.models import architecture

    engine = Engine(strategy="megatron", mesh=Mesh(), param_dtype="bfloat16", kernels="te")
    wide = Job(
        architecture=architecture("Llama-3.1-70B"),
        engine=engine,
        world=8,
        device="B200",
        sequences=1,
        tokens=4096,
        longest=4096,
    )
    assert 2 * sum(linear_shapes(rank_of(wide, MegatronFlags()))) / 2**30 == pytest.approx(1.59, abs=0.005)
