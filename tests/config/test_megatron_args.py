"""Megatron's command line: defaults of its parser, sizes against published counts, and its small layout languages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.config.megatron_args import architecture_of, engine_of, padded_vocab
from flowledger.config.megatron_layout import hybrid_kinds, layout_stages, listed, moe_pattern
from flowledger.flow.errors import BadInput
from flowledger.plan.weights import count

GPT = {"--num-layers": 12, "--hidden-size": 512, "--num-attention-heads": 8, "--seq-length": 1024}


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "billions"),
    # arXiv 2104.04473, table 1 (s = 2048, V = 51,200)
    [(24, 2304, 24, 1.7), (30, 3072, 32, 3.6), (36, 4096, 32, 7.5), (96, 12288, 96, 174.6), (128, 25600, 160, 1008.0)],
)
def test_parameters_come_to_the_published_counts(layers: int, hidden: int, heads: int, billions: float) -> None:
    arch = architecture_of(
        {
            "--num-layers": layers, "--hidden-size": hidden, "--num-attention-heads": heads, "--seq-length": 2048,
            "--max-position-embeddings": 2048, "--vocab-size": 51200,
        }
    )  # fmt: skip
    assert count(arch) / 1e9 == pytest.approx(billions, abs=0.05)


@given(
    layers=st.integers(1, 96),
    width=st.integers(1, 64),
    heads=st.sampled_from([1, 2, 4, 8]),
    sequence=st.integers(1, 4096),
    tied=st.booleans(),
)
def test_parameters_follow_the_papers_formula(layers: int, width: int, heads: int, sequence: int, tied: bool) -> None:
    """12 L H² (1 + 13/(12H) + (V + S)/(12 L H)) of arXiv 2104.04473, equation 2, and the final norm it leaves out."""
    hidden = 64 * width
    arch = architecture_of(
        {
            "--num-layers": layers, "--hidden-size": hidden, "--num-attention-heads": heads, "--seq-length": sequence,
            "--vocab-size": 1280, "--untie-embeddings-and-output-weights": not tied,
        }
    )  # fmt: skip
    heads_and_tables = (1280 * (1 if tied else 2) + sequence) * hidden
    assert count(arch) == 12 * layers * hidden**2 + 13 * layers * hidden + heads_and_tables + 2 * hidden


@pytest.mark.parametrize(("tp", "rows"), [(1, 50304), (2, 50432), (4, 50688), (8, 51200)])
def test_gpt2_vocabulary_is_padded_as_megatron_prints(tp: int, rows: int) -> None:
    assert padded_vocab({"tensor-model-parallel-size": tp}) == rows


def test_defaults_are_those_of_the_parser() -> None:
    arch, engine = architecture_of(GPT), engine_of({**GPT, "--bf16": True}, 8)
    assert (arch.mlp, arch.norm, arch.positions, arch.tied, arch.ffn, arch.qkv_bias) == (
        "gelu", "layernorm", "learned", True, 2048, True,
    )  # fmt: skip
    assert (engine.param_dtype, engine.grad_dtype, engine.distributed_optimizer) == ("bfloat16", "float32", False)
    assert engine.mesh is not None and (engine.mesh.dp, engine.mesh.tp, engine.mesh.vpp) == (8, 1, 1)
    assert engine.gradient_accumulation_fusion and engine.recompute.granularity == "none"


def test_underscores_and_missing_dashes_are_the_same_names() -> None:
    assert architecture_of({key.lstrip("-").replace("-", "_"): value for key, value in GPT.items()}) == architecture_of(
        GPT
    )


def test_fp16_keeps_its_gradients_narrow_and_bf16_may_reduce_in_its_own() -> None:
    assert engine_of({**GPT, "--fp16": True}).grad_dtype == "float16"
    assert engine_of({**GPT, "--bf16": True, "--grad-reduce-in-bf16": True}).grad_dtype == "bfloat16"
    assert engine_of({**GPT, "--fp16": True, "--accumulate-allreduce-grads-in-fp32": True}).grad_dtype == "float32"


def test_swiglu_takes_two_thirds_in_multiples_of_64() -> None:
    arch = architecture_of({**GPT, "--swiglu": True})
    assert (arch.mlp, arch.ffn) == ("swiglu", 1344)  # the golden run of pp4_swiglu holds 1344


def test_deepseek_layout_and_experts_are_read() -> None:
    args = {
        **GPT, "--num-layers": 14, "--num-experts": 64, "--moe-layer-freq": "([0]*3+[1]*11)", "--moe-router-topk": 8,
        "--moe-ffn-hidden-size": 2048, "--moe-shared-expert-intermediate-size": 2048, "--multi-latent-attention": True,
        "--q-lora-rank": 1536, "--kv-lora-rank": 512, "--mtp-num-layers": 1, "--pipeline-model-parallel-size": 4,
        "--pipeline-model-parallel-layout": "Et*2|(tt|)*5t|tmL", "--expert-model-parallel-size": 16,
        "--expert-tensor-parallel-size": 1,
    }  # fmt: skip
    arch, engine = architecture_of(args), engine_of(args)
    assert arch.moe is not None and arch.mla is not None and engine.mesh is not None
    assert (arch.moe.dense, arch.moe.topk, arch.mla.q_lora, arch.mtp_layers) == ((0, 1, 2), 8, 1536, 1)
    assert engine.layers_in_stages == (2, 2, 2, 2, 2, 2, 1, 1)
    assert (engine.mesh.vpp, engine.mesh.ep, engine.mesh.etp) == (2, 16, 1)


def test_virtual_stages_follow_from_layers_of_each_or_their_number() -> None:
    each = engine_of({**GPT, "--pipeline-model-parallel-size": 4, "--num-layers-per-virtual-pipeline-stage": 1})
    number = engine_of({**GPT, "--pipeline-model-parallel-size": 2, "--num-virtual-stages-per-pipeline-rank": 3})
    assert each.mesh is not None and number.mesh is not None and (each.mesh.vpp, number.mesh.vpp) == (3, 3)


def test_embedding_and_loss_may_count_as_layers() -> None:
    engine = engine_of(
        {
            **GPT, "--num-layers": 6, "--pipeline-model-parallel-size": 4, "--num-virtual-stages-per-pipeline-rank": 2,
            "--account-for-embedding-in-pipeline-split": True, "--account-for-loss-in-pipeline-split": True,
        }
    )  # fmt: skip
    assert engine.layers_in_stages == (0, 1, 1, 1, 1, 1, 1, 0)


def test_precision_aware_optimizer_has_moments_of_its_own_dtype() -> None:
    aware = {**GPT, "--bf16": True, "--use-precision-aware-optimizer": True, "--exp-avg-dtype": "bf16"}
    assert engine_of(aware).optimizer.moment_dtype == "bfloat16"
    assert engine_of(GPT).optimizer.moment_dtype is None


@pytest.mark.parametrize(
    ("more", "bytes_"),
    [
        ({"--bf16": True}, 16),  # only the 16 bits that bf16 parameters lack
        ({"--bf16": True, "--main-params-dtype": "fp16"}, 16),
        ({"--bf16": True, "--optimizer-cpu-offload": True}, 32),
        ({"--fp16": True}, 32),
    ],
)
def test_precision_aware_masters_take_16_bits_beside_bf16_parameters(more: dict[str, object], bytes_: int) -> None:
    """megatron/core/optimizer/optimizer_config.py store_param_remainders, true by default."""
    found = engine_of({**GPT, "--use-precision-aware-optimizer": True, **more}, 1).optimizer.master_dtype
    assert found == f"float{bytes_}"
    assert engine_of({**GPT, "--bf16": True}, 1).optimizer.master_dtype == "float32"


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("Et*3|(tt|)*6L", (3, 2, 2, 2, 2, 2, 2, 0)),
        ("Ett|tt|tL", (2, 2, 1)),
        (r"Et*3\\|\\(tt\\|\\)*6L", (3, 2, 2, 2, 2, 2, 2, 0)),
    ],
)
def test_pipeline_layouts_expand(layout: str, stages: tuple[int, ...]) -> None:
    assert layout_stages(layout) == stages


def test_expert_layers_as_a_frequency_or_a_list() -> None:
    assert moe_pattern("2", 5) == (True, False, True, False, True)
    assert moe_pattern("([0]*1+[1]*2)", 3) == (False, True, True)
    assert moe_pattern("[0,1,1]", 3) == (False, True, True)


def test_hybrid_patterns_and_lists() -> None:
    assert hybrid_kinds("M-*E") == ("linear", "feed_forward", "full", "feed_forward")
    assert listed("[layernorm mla_up_proj]") == listed(["layernorm", "mla_up_proj"]) == ["layernorm", "mla_up_proj"]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"--hidden-size": None}, "--hidden-size"),
        ({"--num-attention-heads": "many"}, "--num-attention-heads"),
        ({"--tokenizer-type": "HuggingFaceTokenizer"}, "--vocab-size"),
        ({"--num-experts": 8, "--moe-layer-freq": "sometimes"}, "--moe-layer-freq"),
        ({"--hybrid-layer-pattern": "M?"}, "hybrid pattern"),
    ],
)
def test_faults_name_the_argument(change: dict[str, object], names: str) -> None:
    with pytest.raises(BadInput, match=names):
        architecture_of({**GPT, **change})


def test_a_layout_with_unknown_letters_is_refused() -> None:
    with pytest.raises(BadInput, match="layout"):
        layout_stages("Exx|L")
