"""flowledger's own loop on several ranks: what each of them samples, and what it holds while it does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowledger.config.schema import RunConfig
from flowledger.ledger.rows import MemoryRow, TensorRow
from flowledger.plan.chain import chain
from flowledger.plan.document import document
from flowledger.plan.own_loop import prefill, shares
from flowledger.plan.plan import Plan
from flowledger.plan.whatif import changed, with_config
from tests.plan.conftest import planned
from tests.plan.spread_runs import module
from tests.run import worlds

SHARDS, TINY = planned("shards.yaml"), planned("tiny.yaml")
TOLERANCE = 0.02
PROMPT, RESPONSE, GROUP = 32, 4, 2


def of(plan: Plan, **changes: Any) -> Plan:
    config = plan.config
    for key, value in changes.items():
        config = changed(config, key.replace("__", "."), value)
    return with_config(plan, config)


def config(folder: Path, prompts: int, mesh: dict[str, int], **changes: Any) -> RunConfig:
    """Prompts of equal length, so that what is planned at the limits is what happens."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": letter * PROMPT, "answer": "x"}) + "\n" for letter in "abcdefgh"))
    (folder / "by_length.py").write_text("def reward(response, answer):\n    return float(len(response) % 3)\n")
    return worlds.config(
        model={"tiny": {"hidden_size": 128, "layers": 1, "heads": 4, "kv_heads": 2, "ffn_size": 352}},
        data={"path": str(path), "prompts_per_step": prompts, "max_prompt_tokens": PROMPT},
        reward={"components": [{"name": "r", "kind": "function", "path": f"{folder / 'by_length.py'}:reward"}]},
        actor={"mini_batch_prompts": prompts, "micro_batch": {"samples": 4}}, mesh=mesh,
        **{"rollout": {"samples_per_prompt": GROUP, "max_response_tokens": RESPONSE}, **changes},
    )  # fmt: skip


@given(world=st.integers(1, 12), prompts=st.integers(1, 40))
def test_prompts_are_shared_as_torch_cuts_a_tensor(world: int, prompts: int) -> None:
    found = shares(changed(changed(TINY.config, "mesh.dp", world), "data.prompts_per_step", prompts))
    pieces = [len(piece) for piece in torch.arange(prompts).chunk(world)]
    assert [one.prompts for one in found for _ in range(one.count)] == pieces + [0] * (world - len(pieces))
    assert [one.first for one in found] == [sum(one.count for one in found[:at]) for at in range(len(found))]


@pytest.mark.parametrize("told", [{"layers_in_stages": (2, 0)}, {"layers_in_first_stage": 2}])
def test_prompts_pass_all_layers_on_a_rank_whatever_its_stage_has(told: dict[str, Any]) -> None:
    config = changed(TINY.config, "mesh.pp", 2)
    for key, value in told.items():
        config = changed(config, f"actor.engine.{key}", value)
    assert prefill(config, TINY.architecture, 2, GROUP) == prefill(TINY.config, TINY.architecture, 2, GROUP) > 0


def test_each_rank_has_a_cache_for_its_own_samples() -> None:
    """4 prompts on 4 ranks: 4 slots of 32 + 16 - 1 positions, 2 layers, 2 heads of 16, keys and values, 4 bytes."""
    made = document(SHARDS)
    size = 4 * 47 * 2 * 2 * 16 * 2 * 4
    assert made["engine"]["kv_pool"] == size and made["engine"]["full_samples"] == 4
    assert {row["kv_cache"] for row in made["rows"] if row["stage"] == "rollout"} == {size}
    assert next(row for row in made["estimates"] if row["name"] == "kv_bytes")["estimate"] == size
    caches = [row for row in made["shapes"] if row["tensor_name"] == "kv_cache"]
    assert {str([row["logical_shape"], row["local_shape"]]) for row in caches} == {"[[16, 2, 47, 16], [4, 2, 47, 16]]"}


def test_the_chain_says_who_samples() -> None:
    told = chain(SHARDS.config, SHARDS.architecture, None)
    assert (told["rollout replicas"].value, told["samples of a replica"].value) == (4, 4)
    uneven = chain(changed(SHARDS.config, "data.prompts_per_step", 6), SHARDS.architecture, None)
    assert (uneven["samples of a replica"].value, uneven["rollout replicas"].note) == (
        8, "3 with 2 prompts, 1 with 0 prompts",
    )  # fmt: skip
    alone = chain(TINY.config, TINY.architecture, None)
    assert (alone["rollout replicas"].value, alone["samples of a replica"].value, alone["samples at once"].value) == (
        1,
        16,
        12,
    )


def test_ranks_that_sample_less_hold_less() -> None:
    """6 prompts on 4 ranks are 2, 2, 2 and none."""
    rows = {
        (one.ranks.first, one.ranks.count): one.kinds
        for one in of(SHARDS, data__prompts_per_step=6).memory
        if one.stage == "rollout" and one.step == 1
    }
    assert set(rows) == {(0, 3), (3, 1)}
    assert rows[0, 3]["kv_cache"] == 2 * 4 * 47 * 2 * 2 * 16 * 2 * 4
    assert not {"kv_cache", "temporary", "batch"} & {kind for kind, size in rows[3, 1].items() if size}


def test_passes_go_over_the_micro_batches_of_the_update() -> None:
    """Mini-batches of 8 on 4 ranks are 2 samples each, whatever more a micro-batch might hold."""
    spread = of(TINY, mesh__dp=4, data__prompts_per_step=6)
    assert spread.loads["old_log_prob"] == spread.loads["ref_log_prob"] == spread.loads["update_actor"]
    told = spread.chain
    assert told["old log-probs: micro-batches"].value == 3  # of 3 mini-batches one each
    once = of(TINY, actor__mini_batch_prompts=4)
    assert "old log-probs: micro-batches" not in {row.quantity for row in once.chain.rows}  # one optimizer step


def test_a_rank_samples_its_share_as_one_process_would() -> None:
    """3 prompts on two ranks: what one process with 2 prompts holds, and with 1, which is compared with recordings elsewhere."""
    made = ("kv_cache", "temporary", "batch")
    spread = {
        one.ranks.first: one.kinds
        for one in of(TINY, mesh__dp=2, data__prompts_per_step=3).memory
        if one.stage == "rollout"
    }
    for rank, prompts in ((0, 2), (1, 1)):
        alone = of(TINY, data__prompts_per_step=prompts, actor__mini_batch_prompts=1).memory
        (due, _) = [one.kinds for one in alone if one.stage == "rollout"]
        assert {kind: spread[rank][kind] for kind in made} == {kind: due[kind] for kind in made}


def test_the_greedy_responses_of_a_baseline_as_they_were_recorded(tmp_path: Path) -> None:
    """2 slots: first one prompt at a time and its 2 samples, then 2 prompts at a time with one response each."""
    few = {"samples_per_prompt": GROUP, "max_response_tokens": RESPONSE, "max_running": 2}
    made = config(tmp_path, 4, {}, rollout=few, algorithm={"advantage": "remax"})
    agree, sizes = module("peaks_agree"), dict[str, int]()
    for row in module("shapes_agree").rows_of_step(made, ops_every=1):
        if isinstance(row, MemoryRow) and (row.instant, row.stage) == ("peak", "rollout"):
            sizes[row.kind] = row.allocated
    recorded = sum(sizes.values())
    due = next(one for one in agree.planned(made).memory if (one.stage, one.step) == ("rollout", 0))
    assert due.peak.instant == "rollout/greedy prefill"
    assert due.peak.bytes == pytest.approx(recorded, rel=TOLERANCE)
    plain = agree.planned(changed(made, "algorithm.advantage", "grpo")).memory
    assert plain[1].stage == "rollout" and plain[1].peak.bytes < (1 - TOLERANCE) * recorded  # it would be seen


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
def test_in_bypass_mode_the_rollouts_log_probs_are_read_as_old_ones(loss: str) -> None:
    correction = {"loss": loss, "importance": "token" if loss == "reinforce" else "none"}
    made = worlds.config(algorithm={"policy_loss": "bypass_mode", "rollout_correction": correction})
    rows = module("shapes_agree").rows_of_step(made)
    plan = module("peaks_agree").planned(made)

    def met(found: list[Any]) -> set[tuple[str | None, str, str | None]]:
        return {(row.stage, row.access, row.dims.strip("[]")) for row in found if row.tensor_name == "old_log_prob"}

    recorded = met([row for row in rows if isinstance(row, TensorRow)])
    assert recorded == met(plan.shapes) and {stage for stage, _, _ in recorded} == {"advantage", "update_actor"}
    (fate,) = [fate for fate in plan.fates if fate["tensor_name"] == "old_log_prob"]
    assert (fate["born_at"], fate["freed_at"]) == ("rollout", "update_actor")
    held = {live.name for one in plan.memory for live in one.peak.lives}
    assert "rollout_log_prob" in held and "old_log_prob" not in held  # one storage
    assert not [row.quantity for row in plan.chain.rows if row.quantity.startswith("old log-probs")]
