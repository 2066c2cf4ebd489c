"""Rules say what verl's own scripts break, what bug reports met, and the nearest values that do work."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from flowledger.ledger.rows import FindingRow
from flowledger.plan.checks import applicable, check
from flowledger.plan.facts import facts
from flowledger.plan.lengths import parse
from flowledger.plan.nearest import holds, nearest_integers, ways
from flowledger.tables.rules import FIRES_AT
from tests.plan.rules_data import REPORTS, SCRIPTS, foreign, model, verl

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
DYNAMIC = {
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
    f"{ROLLOUT}.name": "vllm",
    "algorithm.adv_estimator": "grpo",
}
HOUSE = {**DYNAMIC, "data.train_batch_size": 40, f"{ACTOR}.ppo_mini_batch_size": 5, f"{ROLLOUT}.n": 4}


def ids(rows: list[FindingRow], verdict: str) -> set[str]:
    return {row.id for row in rows if row.verdict == verdict}


def row(rows: list[FindingRow], rule: str) -> FindingRow:
    return next(one for one in rows if one.id == rule)


@pytest.mark.parametrize("case", SCRIPTS, ids=lambda case: case["script"].rpartition("/")[2])
def test_of_verls_own_scripts_exactly_the_broken_ones_fail(case: dict[str, Any]) -> None:
    config = verl(case["settings"], engine=case["engine"], module=case["module"])
    assert ids(check(config, None, None), "fail") >= set(case["fails"])
    known = check(config.model_copy(update={"actor": _mesh(config, case)}), None, None)
    assert ids(known, "fail") == set(case["fails"])


def _mesh(config: Any, case: dict[str, Any]) -> Any:
    """The actor with the mesh that the reader of verl fills in."""
    get = case["settings"].get
    megatron = f"{ACTOR}.megatron"
    mesh = {
        "tp": get(f"{megatron}.tensor_model_parallel_size", 1),
        "pp": get(f"{megatron}.pipeline_model_parallel_size", 1),
    }
    engine = config.actor.engine.model_copy(update={"mesh": config.mesh.model_copy(update=mesh)})
    return config.actor.model_copy(update={"engine": engine})


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report["id"])
def test_a_reported_crash_is_named_before_it_happens(report: dict[str, Any]) -> None:
    shape = {name: report[name] for name in ("heads", "kv_heads") if name in report}
    rows = check(verl(report["settings"], engine=report["engine"]), model(**shape) if shape else None, None)
    found = row(rows, report["rule"])
    assert found.verdict == "fail"
    assert report["use"] in found.message + str(found.fix)


def test_the_message_names_values_condition_moment_and_the_nearest_that_work() -> None:
    found = row(check(verl(HOUSE), None, None), "verl.R5")
    assert found.message == (
        "ppo_mini_batch_size*n = 20 is not divisible by dp = 8 (fires at the first update); use 16 or 24 (ppo_mini_batch_size = 4 or 6)"
    )
    assert found.fix == {"key": f"{ACTOR}.ppo_mini_batch_size", "from": "5", "to": "4 or 6"}
    assert f"mini = 5 ({ACTOR}.ppo_mini_batch_size)" in (found.evidence or [])
    assert (found.scope, found.severity, found.fires_at) == ("plan", "error", "first_update")
    chinese = row(check(verl(HOUSE), None, None, language="zh"), "verl.R5").message
    assert (
        chinese
        == "ppo_mini_batch_size*n = 20 不能被 dp = 8 整除（首次更新时触发）；可用 16 或 24 (ppo_mini_batch_size = 4 或 6)"
    )


def test_a_rule_without_its_input_is_skipped_and_says_what_is_missing() -> None:
    rows = check(verl({**DYNAMIC, f"{ACTOR}.ulysses_sequence_parallel_size": 4}), None, None)
    assert row(rows, "verl.W4").verdict == "skipped"
    assert row(rows, "verl.W4").needs == ["the model (its config.json)"]
    rows = check(verl({**DYNAMIC, f"{ACTOR}.ulysses_sequence_parallel_size": 4}), model(), None)
    assert row(rows, "verl.W4").verdict == "pass"
    no_engine = check(verl({**DYNAMIC, f"{ACTOR}.megatron.tensor_model_parallel_size": None}), None, None)
    assert all(one.needs for one in no_engine if one.verdict == "skipped")


def test_a_rule_that_does_not_apply_has_no_row() -> None:
    rows = check(verl(DYNAMIC), None, None)
    assert not {"verl.L3", "verl.R7", "verl.L23.hybrid", "verl.R2"} & {one.id for one in rows}


def test_rows_stand_in_the_order_in_which_they_would_fire() -> None:
    rows = check(verl({**HOUSE, f"{ROLLOUT}.expert_parallel_size": 3}), model(), None)
    moments = [list(FIRES_AT).index(str(one.fires_at)) for one in rows]
    assert moments == sorted(moments)
    for moment in set(moments):
        severities = [one.severity for one, at in zip(rows, moments, strict=True) if at == moment]
        assert severities == sorted(severities, key=["error", "warning", "info"].index)


def test_static_and_v0_runs_are_held_to_rules_that_dynamic_v1_runs_are_not() -> None:
    static = {"data.train_batch_size": 30, f"{ACTOR}.ppo_mini_batch_size": 8, f"{ROLLOUT}.name": "vllm"}
    static |= {"algorithm.adv_estimator": "grpo", f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1}
    assert "verl.L3" in ids(
        check(verl({**static, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1}), None, None), "fail"
    )
    uneven = {**DYNAMIC, "data.train_batch_size": 60, f"{ACTOR}.ppo_mini_batch_size": 16}
    assert ids(check(verl(uneven), None, None), "fail") == set()
    assert "verl.I4" in ids(check(verl(uneven), None, None), "warn")
    assert {"verl.R2"} <= ids(check(verl({**uneven, "trainer.use_v1": False}), None, None), "fail")


def test_a_version_changes_what_holds() -> None:
    long = {**DYNAMIC, "data.train_batch_size": 64, f"{ACTOR}.ppo_mini_batch_size": 64, f"{ROLLOUT}.n": 1}
    long |= {f"{ROLLOUT}.prompt_length": 1000, f"{ROLLOUT}.response_length": 9000}
    assert "verl.I7" in {one.id for one in check(verl(long), None, None)}
    assert "verl.I7" not in {one.id for one in check(verl(long, version="0.9.1"), None, None)}
    old = {**long, f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation": False}
    assert "verl.I1" in ids(check(verl(long), None, None), "warn")
    assert "verl.I1" not in {one.id for one in check(verl(old, version="0.9.1"), None, None)}


def test_lengths_that_were_measured_replace_the_longest_that_is_allowed() -> None:
    tight = {**DYNAMIC, f"{ACTOR}.ppo_max_token_len_per_gpu": 4096, f"{ROLLOUT}.prompt_length": 512}
    tight |= {f"{ROLLOUT}.response_length": 8192}
    assert row(check(verl(tight), None, None), "verl.R8").message.startswith(
        "ppo_max_token_len_per_gpu*sp = 4096*1 = 4096 tokens is less than a sample of 8704 tokens"
    )
    assert row(check(verl(tight), None, None), "verl.R8").fix["to"] == "8704"  # type: ignore[index]
    assert row(check(verl(tight), None, parse("p50=256,max=2048")), "verl.R8").verdict == "pass"


@pytest.mark.parametrize(
    ("sizes", "mesh", "rule"),
    [
        ({"heads": 28}, {"tp": 8}, "model.heads_tp"),
        ({"kv_heads": 6, "heads": 48}, {"tp": 4}, "model.heads_tp"),
        ({"layers": 28}, {"pp": 8}, "model.layers_pp"),
        ({"heads": 28}, {"sp": 8}, "model.heads_sp"),
        ({}, {"tp": 3}, "mesh.world"),
    ],
)
def test_sizes_of_the_model_and_the_mesh_agree(sizes: dict[str, int], mesh: dict[str, int], rule: str) -> None:
    hardware = {"nodes": 1, "gpus_per_node": 8}
    framework = "trl" if rule == "mesh.world" else "areal"
    bad = check(foreign(framework, {}, hardware=hardware, mesh=mesh), model(**sizes), None)
    assert rule in ids(bad, "fail")
    assert rule not in ids(check(foreign(framework, {}, hardware=hardware), model(**sizes), None), "fail")


def test_a_named_first_stage_takes_its_layers_out_of_the_even_split() -> None:
    engine = {"strategy": "megatron", "layers_in_first_stage": 5, "layers_in_last_stage": 5}
    config = foreign("slime", {}, hardware={"nodes": 16}, mesh={"pp": 16}, actor={"engine": engine})
    raw = {"pipeline_model_parallel_size": 16, "rollout_batch_size": 8, "rollout_max_response_len": 10}
    config = config.model_copy(update={"raw": raw})
    assert row(check(config, model(layers=94), None), "model.layers_pp").verdict == "pass"  # 5 + 14*6 + 5
    assert row(check(config, model(layers=92), None), "model.layers_pp").verdict == "fail"


def test_embedding_and_loss_that_count_as_layers_fill_the_split() -> None:
    override = f"{ACTOR}.megatron.override_transformer_config.account_for"
    counted = {f"{override}_embedding_in_pipeline_split": True, f"{override}_loss_in_pipeline_split": True}
    stages = {f"{ACTOR}.megatron.pipeline_model_parallel_size": 8, "trainer.nnodes": 8}
    even = check(verl({**stages, **counted}, engine="megatron"), model(layers=94), None)  # (94 + 2) / 8: Qwen3-VL-235B
    assert row(even, "model.layers_pp").verdict == "pass"
    uneven = check(verl(stages, engine="megatron"), model(layers=94), None)
    assert row(uneven, "model.layers_pp").verdict == "fail"


def test_what_a_proposed_value_would_break_is_said() -> None:
    static = {**DYNAMIC, f"{ACTOR}.use_dynamic_bsz": False, f"{ROLLOUT}.log_prob_use_dynamic_bsz": False}
    static |= {"data.train_batch_size": 96, f"{ACTOR}.ppo_mini_batch_size": 24, f"{ROLLOUT}.n": 4}
    static |= {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 5, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1}
    found = row(check(verl(static), None, None), "verl.R7")  # 24*4/8 = 12 samples in micro-batches of 5
    assert found.fix == {"key": f"{ACTOR}.ppo_micro_batch_size_per_gpu", "from": "5", "to": "4 or 6"}
    assert found.next_step == f"or set {ACTOR}.ppo_mini_batch_size = 20 or 30"
    wide = {**static, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 12, f"{ROLLOUT}.n": 3}  # 24*3/8 = 9 samples
    found = row(check(verl({**wide, "trainer.n_gpus_per_node": 7, "data.train_batch_size": 98}), None, None), "verl.R5")
    assert found.fix == {"key": f"{ACTOR}.ppo_mini_batch_size", "from": "24", "to": "21 or 28"}


BATCH = {  # what these frameworks take where nothing is said
    "openrlhf": {"rollout.batch_size": 1024, "rollout.n_samples_per_prompt": 1},
    "nemo_rl": {"grpo.num_prompts_per_step": 32, "grpo.num_generations_per_prompt": 16},
}
FRAMEWORKS: list[tuple[str, dict[str, Any], set[str]]] = [
    ("trl", {"per_device_train_batch_size": 4, "num_generations": 8, "gradient_accumulation_steps": 1}, {"trl.T3"}),
    ("trl", {"per_device_train_batch_size": 4, "num_generations": 8, "gradient_accumulation_steps": 2}, set()),
    ("trl", {"num_generations": 1, "auto_find_batch_size": True}, {"trl.T4", "trl.T6.auto"}),
    ("openrlhf", {"algo.advantage.estimator": "rloo"}, {"openrlhf.O1"}),
    ("openrlhf", {"train.async_enable": True, "train.colocate_all": True, "vllm.enable_sleep": True}, {"openrlhf.O7"}),
    ("openrlhf", {"train.batch_size": 100, "actor.num_gpus_per_node": 8}, {"openrlhf.O11"}),
    (
        "slime",
        {"--rollout-batch-size": 8, "--n-samples-per-prompt": 4, "--global-batch-size": 32, "--rollout-max-response-len": 8192,
         "--use-dynamic-batch-size": True, "--max-tokens-per-gpu": 20480, "--tensor-model-parallel-size": 4,
         "--actor-num-gpus-per-node": 8, "--rollout-num-gpus-per-engine": 8, "--colocate": True,
         "--expert-model-parallel-size": 8, "--expert-tensor-parallel-size": 1},
        set(),
    ),  # Qwen3-30B-A3B of slime's scripts
    (
        "slime",
        {"--rollout-batch-size": 8, "--n-samples-per-prompt": 4, "--global-batch-size": 36, "--rollout-max-response-len": 8192,
         "--num-steps-per-rollout": 1, "--use-dynamic-batch-size": True, "--max-tokens-per-gpu": 4096},
        {"slime.S1", "slime.S10", "slime.S15"},
    ),
    ("areal", {"train_dataset.batch_size": 30, "gconfig.n_samples": 4}, {"areal.A1"}),
    ("nemo_rl", {}, set()),
    ("nemo_rl", {"cluster.gpus_per_node": 8, "policy.train_global_batch_size": 500}, {"nemo_rl.N2", "nemo_rl.N3"}),
    (
        "nemo_rl",
        {"policy.dtensor_cfg.tensor_parallel_size": 4, "cluster.gpus_per_node": 8, "policy.logprob_batch_size": 8},
        {"nemo_rl.N7"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "raw", "fails"), FRAMEWORKS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_framework_is_held_to_its_own_rules(framework: str, raw: dict[str, Any], fails: set[str]) -> None:
    sections: dict[str, Any] = {}
    if framework == "areal":
        sections = {"hardware": {"gpus_per_node": 8}, "mesh": {"dp": 8}}
    raw = {**BATCH.get(framework, {}), **raw}
    assert ids(check(foreign(framework, raw, **sections), None, None), "fail") == fails


def test_a_batch_that_counts_samples_is_told_apart_from_one_that_counts_prompts() -> None:
    raw = {"policy.train_global_batch_size": 32, "grpo.num_prompts_per_step": 32}
    assert "nemo_rl.I5" in ids(check(foreign("nemo_rl", raw), None, None), "warn")


def test_flowledgers_own_mesh_has_as_many_processes_as_the_machine_is_given() -> None:
    config = foreign(
        "flowledger", {}, mesh={"dp": 2}, hardware={"gpus_per_node": 4}, data={"task": "chain_sum", "path": None}
    )
    assert row(check(config, None, None), "flowledger.mesh").fix == {"key": "mesh.dp", "from": "2", "to": "4"}


@given(st.integers(1, 64), st.integers(1, 12), st.integers(1, 64))
def test_nearest_values_satisfy_the_rule_and_none_nearer_does(mini: int, n: int, gpus: int) -> None:
    settings = {**HOUSE, f"{ACTOR}.ppo_mini_batch_size": mini, f"{ROLLOUT}.n": n, "trainer.n_gpus_per_node": gpus}
    names = facts(verl(settings), None, None)
    rule = next(one for one in applicable(verl(settings), names) if one.id == "verl.R5")
    if (mini * n) % gpus == 0:
        assert holds(rule, dict(names.values))
        return
    way = ways(rule, names)[0]
    good = [value for value in range(1, 4 * 64 * 64) if value * n % gpus == 0]
    below = [value for value in good if value < mini][-1:]
    above = [value for value in good if value > mini][:1]
    assert list(way.values) == below + above
    assert list(way.shown) == [value * n for value in below + above]


@given(st.integers(1, 10**7), st.integers(1, 10**7))
def test_a_limit_far_away_is_found_exactly(current: int, limit: int) -> None:
    found = nearest_integers(lambda value: value >= limit, current)
    expected = [current - 1] * (current - 1 >= max(1, limit)) + [max(limit, current + 1)]
    assert found == expected


@examples(deadline=None, max_examples=40)
@given(
    st.integers(1, 40), st.integers(1, 6), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.integers(1, 12),
    st.sampled_from([1, 2, 3, 4]), st.booleans(),
)  # fmt: skip
def test_for_every_broken_rule_the_values_proposed_are_the_nearest_that_mend_it(
    prompts: int, n: int, mini: int, micro: int, log_prob: int, gpus: int, rtp: int, v1: bool
) -> None:
    settings = {"data.train_batch_size": prompts, f"{ROLLOUT}.n": n, f"{ACTOR}.ppo_mini_batch_size": mini,
                f"{ACTOR}.ppo_micro_batch_size_per_gpu": micro, "trainer.n_gpus_per_node": gpus, "trainer.use_v1": v1,
                f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": log_prob, f"{ROLLOUT}.name": "vllm",
                f"{ROLLOUT}.tensor_model_parallel_size": rtp, "algorithm.adv_estimator": "grpo"}  # fmt: skip
    config = verl(settings)
    names = facts(config, None, None)
    rules = {rule.id: rule for rule in applicable(config, names)}
    for found in check(config, None, None):
        if found.verdict != "fail":
            continue
        for way in ways(rules[found.id], names):
            for value in way.values:
                assert holds(rules[found.id], names.varied(way.knob, value, names.order))
                between = range(min(value, way.current) + 1, max(value, way.current))
                assert not any(holds(rules[found.id], names.varied(way.knob, v, names.order)) for v in between)


SAPO = {"policy_loss": "sapo"}
BYPASS = {"policy_loss": "bypass_mode", "rollout_correction": {"importance": "token"}}
WARMUP = {"steps": 3, "algorithm": {"advantage": "gae"}}


@pytest.mark.parametrize(
    ("rule", "sections", "mended"),
    [
        ("flowledger.aggregation", {"algorithm": {**SAPO}}, {"algorithm": {**SAPO, "loss_aggregation": "seq-mean-token-mean"}}),
        (
            "flowledger.bypass_weights",
            {"algorithm": BYPASS},
            {"algorithm": {**BYPASS, "rollout_correction": {"importance": "token", "loss": "reinforce"}}},
        ),
        (
            "flowledger.bypass_loss",
            {"algorithm": {"rollout_correction": {"loss": "reinforce"}}},
            {"algorithm": {"policy_loss": "bypass_mode", "rollout_correction": {"loss": "reinforce"}}},
        ),
        (
            "flowledger.normalize",
            {"algorithm": {"rollout_correction": {"normalize": True}}},
            {"algorithm": {"rollout_correction": {"normalize": True, "importance": "token"}}},
        ),
        (
            "flowledger.weight_low",
            {"algorithm": {"rollout_correction": {"low": 0.5}}},
            {"algorithm": {"rollout_correction": {"low": 0.5, "importance": "token"}}},
        ),
        ("flowledger.warmup", {**WARMUP, "critic": {"warmup_steps": 3}}, {**WARMUP, "critic": {"warmup_steps": 2}}),
        (
            "algorithm.group",
            {"algorithm": {"advantage": "gpg"}, "rollout": {"samples_per_prompt": 1}},
            {"algorithm": {"advantage": "gpg"}},
        ),
    ],
)  # fmt: skip
def test_settings_of_the_loop_that_do_nothing_are_warned_of(
    rule: str, sections: dict[str, Any], mended: dict[str, Any]
) -> None:
    def verdict(sections: dict[str, Any]) -> str:
        config = foreign("flowledger", {}, data={"task": "chain_sum", "path": None}, **sections)
        return str(row(check(config, None, None), rule).verdict)

    assert (verdict(sections), verdict(mended)) == ("warn", "pass")
