"""The trace: a model's own code under FakeTensor beside the closed form, and beside a real training on the CPU."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowledger.config.engine import Engine, Logits, Mesh, Optimizer, Recompute
from flowledger.flow.errors import BadInput
from flowledger.flow.kinds import KINDS
from flowledger.plan.job import Job
from flowledger.plan.trace.compare import AGREES, Traced, closed, compare_with, run, trace
from flowledger.plan.trace.model import build
from flowledger.plan.trace.storages import Storages
from flowledger.tables.models import Architecture, architecture

FULL = Recompute(granularity="full")
OWN = {"dtype": "float32", "temperature_copy": True, "entropy": "full"}
HALF: dict[str, Any] = {"param_dtype": "bfloat16", "attention": "sdpa"}
FSDP: dict[str, Any] = {
    "strategy": "fsdp2", "param_dtype": "float32", "compute_dtype": "bfloat16", "reduce_dtype": "float32",
    "attention": "sdpa",
}  # fmt: skip
TINY = Architecture(
    name="tiny", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=512, tied=True, qk_norm="head"
)


def sized(name: str, layers: int) -> Architecture:
    return replace(architecture(name), layers=layers)


def job(arch: Architecture, world: int = 1, tokens: int = 4096, gradients: bool = True, **engine: Any) -> Job:
    more = {key: engine.pop(key) for key in ("micro_batches", "device", "logit_tokens") if key in engine}
    return Job(
        architecture=arch, engine=Engine(**engine), world=world, sequences=1, tokens=tokens, longest=tokens,
        gradients=gradients, **more,
    )  # fmt: skip


TABLE: dict[str, tuple[str, int, dict[str, Any]]] = {
    "float32, own loop": ("Qwen3-0.6B", 1, {"attention": "sdpa", "logits": Logits(**OWN)}),
    "own loop, picked rows": ("Qwen3-0.6B", 1, {**HALF, "logits": Logits(**OWN), "logit_tokens": 2048}),
    "upcast beside, loop": ("Qwen2.5-0.5B", 1, {**HALF, "logits": Logits(upcast=True)}),
    "recast, temperature, foreach": (
        "Qwen3-0.6B", 1, {**HALF, "device": "h100-80g", "logits": Logits(dtype="float32", temperature_copy=True)},
    ),
    "float32 recompute, untied": ("Llama-3.1-8B", 1, {"attention": "sdpa", "recompute": FULL}),
    "ddp, two micro-batches, fused": (
        "Qwen3-0.6B", 8, {**HALF, "strategy": "ddp", "micro_batches": 2, "optimizer": Optimizer(implementation="fused")},
    ),
    "fsdp2 of 8, recompute": ("Llama-3.2-1B", 8, {**FSDP, "recompute": FULL}),
    "fsdp2 of 64": ("Qwen3-0.6B", 64, FSDP),
    "fsdp2 of 8, not resharded": ("Qwen3-1.7B", 8, {**FSDP, "reshard_after_forward": False}),
    "fsdp2 of 8, whole gradients wait": (
        "Qwen3-0.6B", 8, {**FSDP, "recompute": FULL, "accumulates_unsharded": True, "micro_batches": 2},
    ),
    "fsdp2 of 8, reduced twice": ("Qwen3-0.6B", 8, {**FSDP, "recompute": FULL, "micro_batches": 2}),
    "fsdp2 of 64, flash, entropy": (
        "Qwen3-0.6B", 64,
        {**FSDP, "device": "h100-80g", "logits": Logits(temperature_copy=True, cross_entropy="flash", entropy="full")},
    ),
    "fsdp2 of 64 with tp": ("Qwen3-0.6B", 64, {**FSDP, "mesh": Mesh(tp=4)}),
    "entropy, upcast": (
        "Qwen3-0.6B", 8, {**FSDP, "logits": Logits(upcast=True, entropy="full", temperature_copy=True)}
    ),
    "untied, fsdp2 of 8": ("Qwen2.5-7B", 8, {**FSDP, "recompute": FULL}),
    "untied, flash, its logits dropped": (
        "Qwen2.5-7B", 64,
        {
            **FSDP, "device": "h100-80g", "recompute": FULL, "outside": "head",
            "logits": Logits(temperature_copy=True, cross_entropy="flash", kept=False),
        },
    ),
    "untied, norm and head in the root": ("Qwen2.5-7B", 8, {**FSDP, "recompute": FULL, "outside": "embedding"}),
    "untied, all in the root": ("Qwen2.5-7B", 8, {**FSDP, "recompute": FULL, "outside": "root"}),
    "untied, tp": ("Qwen2.5-7B", 64, {**FSDP, "mesh": Mesh(tp=4), "recompute": FULL}),
    "chunked": ("Qwen3-0.6B", 1, {**HALF, "logits": Logits(implementation="chunked", chunk_tokens=1024)}),
    "untied, chunked": (
        "Qwen2.5-7B", 64, {**FSDP, "recompute": FULL, "logits": Logits(implementation="chunked", chunk_tokens=1024)},
    ),
    "pieces, entropy": (
        "Qwen3-0.6B", 8,
        {**FSDP, "recompute": FULL, "logits": Logits(chunk_tokens=1024, dtype="float32", entropy="full")},
    ),
    "eager": ("Qwen3-0.6B", 1, {**HALF, "attention": "eager", "recompute": FULL}),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_the_closed_form_agrees(case: str) -> None:
    name, world, engine = TABLE[case]
    asked = job(sized(name, 2), world, **engine)
    assert closed(asked) == pytest.approx(trace(asked, "update_actor").bytes, rel=AGREES)


@pytest.mark.parametrize(
    "case",
    [
        "float32, own loop",
        "recast, temperature, foreach",
        "fsdp2 of 8, recompute",
        "fsdp2 of 64 with tp",
        "fsdp2 of 8, not resharded",
        "untied, fsdp2 of 8",
        "untied, flash, its logits dropped",
        "untied, norm and head in the root",
        "untied, all in the root",
        "chunked",
        "pieces, entropy",
        "eager",
    ],
)
def test_a_pass_without_gradients_agrees(case: str) -> None:
    name, world, engine = TABLE[case]
    asked = job(sized(name, 2), world, gradients=False, **engine)
    assert closed(asked) == pytest.approx(trace(asked, "old_log_prob").bytes, rel=AGREES)


def test_all_layers_of_a_model_agree() -> None:
    asked = job(architecture("Llama-3.2-1B"), **HALF)
    assert closed(asked) == pytest.approx(trace(asked, "update_actor").bytes, rel=AGREES)


@pytest.mark.parametrize(
    "engine",
    [
        {"attention": "sdpa"},
        {**HALF, "recompute": FULL},
        {"attention": "sdpa", "logits": Logits(implementation="chunked", chunk_tokens=64, **OWN)},
        {"attention": "sdpa", "micro_batches": 2, "optimizer": Optimizer(implementation="loop")},
    ],
)
def test_a_real_training_on_the_cpu_peaks_at_the_same_bytes(engine: dict[str, Any]) -> None:
    asked = job(TINY, tokens=256, **engine)
    with Storages().watching() as storages:
        model = build(asked)
        run(model, asked, storages)
    assert sum(storages.peak.values()) == trace(asked, "update_actor").bytes


def test_a_second_step_peaks_where_the_first_did() -> None:
    asked = job(TINY, tokens=256, attention="sdpa")
    with Storages().watching() as storages:
        model = build(asked)
        run(model, asked, storages)
        first = sum(storages.peak.values())
        run(model, asked, storages)
    assert sum(storages.peak.values()) == pytest.approx(first, rel=1e-3)


def test_kinds_are_those_of_the_ledger_and_hold_what_must_be_there() -> None:
    found = trace(job(TINY, tokens=64, attention="sdpa"), "update_actor")
    parameters = sum(one.numel() for one in build(job(TINY)).parameters())
    assert set(found.kinds) <= set(KINDS)
    assert found.bytes == sum(found.kinds.values())
    assert found.kinds["optimizer"] == pytest.approx(8 * parameters, rel=1e-2)
    assert found.kinds["param"] == pytest.approx(4 * parameters, rel=1e-2)


def test_fsdp_cuts_what_it_keeps_by_the_ranks() -> None:
    eight, sixteen = (trace(job(TINY, world, 64, **FSDP), "update_actor") for world in (8, 16))
    assert eight.kinds["optimizer"] == pytest.approx(2 * sixteen.kinds["optimizer"], rel=0.01)


def test_the_grouping_of_areal_gathers_the_head_first() -> None:
    """Root whole and flat, embedding whole and flat: four times the head, at the start of a pass."""
    asked = job(replace(TINY, tied=False, vocab=60000), 8, 16, gradients=False, outside="embedding", **FSDP)
    head = 2 * 60000 * 64
    assert trace(asked, "ref_log_prob").kinds["comm_buffer"] >= 3 * head


def plan_of(asked: Job) -> Any:
    """What compare_with reads of a plan: an actor's job, and a critic's that it leaves alone."""
    jobs = {
        ("update_actor", "rank"): (SimpleNamespace(role="actor"), asked),
        ("update_critic", "rank"): (SimpleNamespace(role="critic"), replace(asked, head="value")),
    }
    return SimpleNamespace(jobs=jobs, classes=[SimpleNamespace(name="rank")])


def test_rows_stand_beside_the_closed_form() -> None:
    (row,) = compare_with(plan_of(job(TINY, tokens=64, attention="sdpa", logits=Logits(upcast=True))))
    assert row["stage"] == "update_actor"
    assert row["deviation"] == pytest.approx(row["planned"] / row["traced"] - 1)
    assert row["agrees"] is (abs(row["deviation"]) <= AGREES)
    assert row["traced"] == sum(row.get(kind, 0) for kind in KINDS)


def test_a_loss_that_no_trace_runs_is_said() -> None:
    (row,) = compare_with(plan_of(job(TINY, tokens=64, attention="sdpa", logits=Logits(implementation="fused"))))
    assert row["agrees"] is None
    assert "fused kernel" in row["reason"]


def test_a_model_that_no_catalogue_knows(tmp_path: Path) -> None:
    """A mixture of experts from its config.json: as many bytes of parameters as its shapes say."""
    experts, layers, hidden, width, vocab = 4, 2, 64, 32, 256
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": hidden,
                "num_hidden_layers": layers, "vocab_size": vocab, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 16, "intermediate_size": 128, "num_experts": experts, "num_experts_per_tok": 2,
                "moe_intermediate_size": width, "tie_word_embeddings": False,
            }
        )
    )  # fmt: skip
    attention = hidden * 64 * 2 + hidden * 32 * 2 + 2 * 16
    layer = attention + 2 * hidden + experts * hidden + experts * 3 * hidden * width
    total = layers * layer + 2 * vocab * hidden + hidden
    for path in (tmp_path, tmp_path / "config.json"):
        found = trace(job(TINY, tokens=64, attention="sdpa"), "update_actor", str(path))
        assert found.kinds["param"] == pytest.approx(4 * total, rel=1e-2)


@pytest.mark.parametrize(
    ("engine", "world", "said"),
    [
        ({"strategy": "megatron", "mesh": Mesh(pp=2)}, 2, "strategy megatron, pp 2"),
        ({"strategy": "fsdp1", "compile": True}, 8, "strategy fsdp1, torch.compile"),
        ({**FSDP, "mesh": Mesh(tp=4)}, 8, "tp 4 does not divide the 2 key-value heads"),
        ({"kernels": "liger"}, 1, "liger kernels"),
    ],
)
def test_what_no_trace_covers_is_one_line(engine: dict[str, Any], world: int, said: str) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        trace(job(TINY, world, 64, **engine), "update_actor")
    assert "\n" not in str(caught.value)


def test_a_model_by_name_that_needs_its_file() -> None:
    with pytest.raises(BadInput, match=r"config\.json"):
        trace(job(architecture("Qwen3-30B-A3B")), "update_actor")


def test_a_path_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--trace: .*nowhere") as caught:
        trace(job(TINY), "update_actor", str(tmp_path / "nowhere"))
    assert "\n" not in str(caught.value)


def test_nothing_is_left_behind() -> None:
    resize, hook = torch.UntypedStorage.resize_, sys.excepthook
    first: Traced = trace(job(TINY, 8, 64, **FSDP), "update_actor")
    with pytest.raises(BadInput):
        trace(job(TINY), "update_actor", "/nowhere/at/all")
    second = trace(job(TINY, 8, 64, **FSDP), "update_actor")
    assert first.kinds == second.kinds
    assert torch.UntypedStorage.resize_ is resize
    assert sys.excepthook is hook
    assert not torch.distributed.is_initialized()


def test_a_process_that_traced_ends_quietly() -> None:
    code = (
        "from flowledger.config.engine import Engine\nfrom flowledger.plan.job import Job\n"
        "from flowledger.plan.trace.compare import trace\nfrom flowledger.tables.models import Architecture\n"
        f"tiny = {TINY!r}\n"
        "engine = Engine(strategy='fsdp2', param_dtype='bfloat16', attention='sdpa')\n"
        "job = Job(architecture=tiny, engine=engine, world=8, sequences=1, tokens=64, longest=64)\n"
        "trace(job, 'update_actor')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
