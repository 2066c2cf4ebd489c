"""Planned against recorded peaks on real ranks: two of them, each stage within 2 %. All axes: benchmarks/peaks_agree.py."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flowledger.config.engine import Engine, Logits, Mesh
from flowledger.config.schema import RunConfig
from flowledger.plan.fsdp import timeline as fsdp
from flowledger.plan.fsdp.pipeline import in_flight
from flowledger.plan.job import Job
from flowledger.plan.memory import LATER
from flowledger.run.models import load_policy
from tests.plan.fsdp_runs import architecture
from tests.run import worlds

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TOLERANCE = 0.02
# The smallest model at which loose ends (indices of rows, columns that the batch arrived in) are below 2 % of a stage.
TINY = {"hidden_size": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_size": 352}
PROMPT = 32


@pytest.fixture
def agree(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("peaks_agree")


def config(folder: Path, number: int, mesh: dict[str, int], **changes: Any) -> RunConfig:
    """So many prompts of equal length, and micro-batches of four samples."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": letter * PROMPT, "answer": "x"}) + "\n" for letter in "abcd"))
    (folder / "by_length.py").write_text("def reward(response, answer):\n    return float(len(response) % 3)\n")
    return worlds.config(
        data={"path": str(prompts), "prompts_per_step": number, "max_prompt_tokens": PROMPT},
        rollout={"samples_per_prompt": 4, "max_response_tokens": 8},
        reward={"components": [{"name": "r", "kind": "function", "path": f"{folder / 'by_length.py'}:reward"}]},
        mesh=mesh,
        **{
            "model": {"tiny": TINY}, "ref": {"path": "start"}, "algorithm": {"kl_coef": 0.1}, **changes,
            "actor": {"mini_batch_prompts": number, "micro_batch": {"samples": 4}, **changes.get("actor", {})},
        },
    )  # fmt: skip


AGAIN = {"activation_checkpointing": True, "log_prob_chunk_tokens": 16}
CRITIC = {"critic": {"path": "start"}, "algorithm": {"advantage": "gae", "kl_coef": 0.1}}


@pytest.mark.parametrize(
    ("mesh", "prompts", "changes"),
    [
        ({"dp": 2}, 3, {"model": {"tiny": TINY, "lora": {"rank": 8}}}),
        ({"tp": 2}, 1, {"actor": AGAIN, **CRITIC}),
        ({"dp": 2}, 1, {"model": {"tiny": TINY, "dtype": "bfloat16"}}),
        ({"pp": 2}, 3, {"actor": {"micro_batch": {"samples": 8}}}),
    ],
    ids=[
        "dp, LoRA, a last micro-batch of two",
        "tp, critic, layers and chunks of logits again",
        "dp, units of half the bytes beside norms in float32",
        "pp, the smaller of two micro-batches in flight",
    ],
)
def test_every_stage_on_every_rank_is_within_two_percent(
    mesh: dict[str, int], prompts: int, changes: dict[str, Any], agree: ModuleType, tmp_path: Path
) -> None:
    pairs = agree.peaks(config(tmp_path, prompts, mesh, **changes))
    assert {pair.rank for pair in pairs} == {0, 1}
    assert {pair.stage for pair in pairs} >= {"rollout", "ref_log_prob", "advantage", "update_actor", "weight_sync"}
    off = {(pair.rank, pair.stage): f"{pair.error:+.1%}" for pair in pairs if abs(pair.error) > TOLERANCE}
    assert off == {}


def test_adapters_of_a_bfloat16_model_are_planned_as_peft_keeps_them(agree: ModuleType) -> None:
    """At rest there are the policy, rollout's copy of it, and two moments of each number that is trained."""
    made = worlds.config(model={"tiny": TINY, "dtype": "bfloat16", "lora": {"rank": 8}})
    weights = list(load_policy(made.model, seed=0).model.parameters())
    held, trained = (
        sum(one.nbytes for one in some) for some in (weights, [one for one in weights if one.requires_grad])
    )
    kinds = next(one.kinds for one in agree.planned(made).memory if (one.stage, one.step) == ("prompt", LATER))
    assert (kinds["param"], kinds["optimizer"]) == (2 * held, 2 * trained)


def staged(pp: int, rank: int, number: int, **engine: Any) -> Job:
    logits = Logits(dtype="float32", temperature_copy=True, entropy="full")
    vpp = engine.pop("vpp", 1)
    made = Engine(attention="sdpa", logits=logits, mesh=Mesh(pp=pp, vpp=vpp), **engine)
    return Job(
        architecture=architecture(layers=8), engine=made, world=pp, sequences=1, tokens=64, longest=64,
        micro_batches=number, pp_rank=rank,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("job", "due"),
    [
        (staged(4, 0, 8), 4),  # one for each stage that it still has to pass through
        (staged(4, 3, 8), 1),
        (staged(4, 0, 2), 2),  # fewer micro-batches than stages: all go forward first
        (staged(2, 0, 8, pipeline="gpipe"), 8),
        (staged(2, 1, 8, pipeline="gpipe"), 8),
        # 2 chunks a rank: warm-up of (2 - 1)*2 + 2*(2 - 1 - rank) chunks, and one more; each is half of the rank's layers
        (staged(2, 0, 8, pipeline="interleaved", vpp=2), 5 / 2),
        (staged(2, 1, 8, pipeline="interleaved", vpp=2), 3 / 2),
    ],
)
def test_micro_batches_in_flight_by_hand(job: Job, due: float) -> None:
    assert in_flight(job) == due


def test_more_micro_batches_in_flight_take_more_and_the_buffers_between_stages_grow_with_them() -> None:
    """Four stages of two layers, 64 tokens of 64 numbers in float32 between them."""
    stream = 4 * 64 * 64
    peaks = [fsdp.timeline(staged(4, 1, number)).peak() for number in (4, 5, 8)]
    received = [sum(one.bytes for one in peak.lives if one.label == "received gradients of hidden states") for peak in peaks]  # fmt: skip
    assert received == [4 * stream, 5 * stream, 8 * stream]
    by_rank = [fsdp.timeline(staged(4, rank, 8)).peak().bytes for rank in (1, 2, 3)]
    assert by_rank == sorted(by_rank, reverse=True)
