"""Composition against Hydra's own, recorded from the configuration trees of the wheel verl 0.9.1 (tests/data/verl/)."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.config.dotted import flat
from flowledger.config.verl.compose import Composed, compose
from flowledger.config.verl.launch import Launch
from flowledger.flow.errors import BadInput
from flowledger.tables import verl

DATA = Path(__file__).parent.parent / "data/verl"
LAUNCHES = json.loads((DATA / "compositions.json").read_text(encoding="utf-8"))["launches"]
RECORDED = json.loads((DATA / "defaults.json").read_text(encoding="utf-8"))
DEFAULTS = {("0.9.1", name): row for name, row in RECORDED["defaults"].items()} | {
    ("head", name): row for name, row in RECORDED["head"].items()
}
MEGATRON = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
COMPOSES = [row for row in LAUNCHES if row["hydra"]["0.9.1"] == "composes"]
REFUSED = [row for row in LAUNCHES if row not in COMPOSES]


def launch(row: dict[str, Any]) -> Launch:
    overrides = tuple((text, f"{row['script']}:{line}") for line, text in enumerate(row["overrides"], 1))
    return Launch(row["module"], row["config_name"], overrides)


def of(*overrides: str, version: str = "head", **environment: str) -> Composed:
    return compose(Launch(overrides=tuple((text, "run.sh:1") for text in overrides)), version, environment)


def digest(leaves: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(sorted(leaves.items())).encode()).hexdigest()


@pytest.mark.parametrize("row", COMPOSES, ids=lambda row: row["script"])
def test_every_leaf_is_hydras(row: dict[str, Any]) -> None:
    leaves = compose(launch(row), "0.9.1").leaves
    assert {key: leaves.get(key) for key in row["differs"]} == row["differs"]
    assert not [key for key in row["gone"] if key in leaves]
    assert (len(leaves), digest(leaves)) == (row["leaves"], row["sha256"])


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row["script"])
def test_refuses_with_hydras_words_and_the_place(row: dict[str, Any]) -> None:
    words = row["hydra"]["0.9.1"].removeprefix("refused: ").rstrip(".")
    with pytest.raises(BadInput) as refusal:
        compose(launch(row), "0.9.1")
    assert words in str(refusal.value)
    assert str(refusal.value).startswith(f"{row['script']}:{len(row['overrides'])}: ")


@pytest.mark.parametrize(("version", "name"), DEFAULTS)
def test_the_defaults_of_every_configuration_are_hydras(version: str, name: str) -> None:
    config, engine = name.split()
    chosen = (("model_engine=" + engine, ""),) if "megatron" not in config else ()
    leaves = compose(Launch(config_name=config, overrides=chosen), version).leaves
    row = DEFAULTS[version, name]
    assert (len(leaves), digest(leaves)) == (row["leaves"], row["sha256"])


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ("actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.ref.log_prob_use_dynamic_bsz", True),
        ("actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", True),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=999", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", 999),
        ("actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.ref.strategy", "fsdp2"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=64", "critic.ppo_mini_batch_size", 64),
        ("critic.ppo_micro_batch_size=4", "critic.forward_micro_batch_size_per_gpu", 4),  # a chain of two
        ("data.max_response_length=4096", "actor_rollout_ref.rollout.response_length", 4096),
        ("trainer.n_gpus_per_node=4", "actor_rollout_ref.rollout.n_gpus_per_node", 4),
        ("trainer.experiment_name=x", "trainer.default_local_dir", "checkpoints/verl_examples/x"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("version", verl.versions())
def test_what_follows_another_key_follows_it(given: str, key: str, value: object, version: str) -> None:
    assert of(given, version=version).leaves[key] == value


def test_versions_differ_where_verl_differs() -> None:
    sync = "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation"
    assert of(version="0.9.1").leaves[sync] is False
    assert sync not in of(version="head").leaves
    offload = "actor_rollout_ref.actor.megatron.grad_offload=true"
    assert of("model_engine=megatron", offload).leaves[offload.partition("=")[0]] is True
    with pytest.raises(BadInput, match=r"Could not override 'actor_rollout_ref\.actor\.megatron\.grad_offload'"):
        of("model_engine=megatron", offload, version="0.9.1")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("actor_rollout_ref.actor.ppo_minibatch_size=4", "did you mean actor_rollout_ref.actor.ppo_mini_batch_size?"),
        ("actor_rollout_ref.actor.fsdp_config.param_ofload=true", "did you mean actor_rollout_ref.actor.fsdp_config.param_offload?"),
        ("actor_rollout_ref.actor.model_engine=megatron", "did you mean model_engine?"),
        ("actor.strategy=fsdp2", "did you mean actor_rollout_ref.actor.strategy?"),
        (f"{MEGATRON}=2", "has no such key with model_engine=dp; give model_engine=megatron"),
        ("+trainer.gpus_per_node.x=[${trainer.nothing}]", "refers to a key that has no value"),
        ("actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation=true", "; verl 0.9.1 has it"),
        ("trainer.gpus_per_node=4", "did you mean trainer.n_gpus_per_node?"),
        ("+data.train_batch_size=4", "(it is 1024); use data.train_batch_size=… without the plus, or ++data.train_batch_size=…"),
        ("model_engine=megatrom", "use dp, megatron, torchtitan, veomni"),
        ("critic=dp_critic", "only model_engine=dp|megatron|torchtitan|veomni"),
        ("actor/x=y", "config group 'actor/x' does not exist"),
        ("trainer.logger={a:1}", "it is a list, not a dictionary"),
        ("trainer.project_name=${trainer.nothing}", "refers to a key that has no value"),
        ("trainer.project_name=${.project_name}", "refers to itself"),
        ("trainer.project_name=${my.resolver:1}", "is not known here"),
        ("trainer.project_name=${oc.env:WHO}", "give --assume WHO=value"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_place_and_the_way_out(override: str, hint: str) -> None:
    with pytest.raises(BadInput) as refusal:
        of(override)
    assert str(refusal.value).startswith("run.sh:1: ")
    assert hint in str(refusal.value)


def test_environment_and_nested_references() -> None:
    leaves = of("trainer.project_name=${oc.env:WHO}-${trainer.nnodes}", "trainer.nnodes=2", WHO="me").leaves
    assert leaves["trainer.project_name"] == "me-2"
    assert leaves["trainer.default_local_dir"] == "checkpoints/me-2/gsm8k"
    assert of("trainer.project_name=${oc.env:WHO,nobody}").leaves["trainer.project_name"] == "nobody"


def test_unknown_versions_modules_and_configurations_name_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"verl 0\.9\.2.*did you mean 0\.9\.1\?"):
        verl.defaults("0.9.2", "ppo_trainer")
    with pytest.raises(BadInput, match=r"main_ppo_sync is no module.*did you mean verl\.trainer\.main_ppo"):
        compose(Launch("verl.trainer.main_ppo_sync"), "head")
    with pytest.raises(BadInput, match=r"'ppo_trainers' is not known; did you mean ppo_trainer\?"):
        compose(Launch(config_name="ppo_trainers"), "head")


def test_defaults_are_fresh_each_time_and_load_quickly() -> None:
    verl.defaults("head", "ppo_trainer")["trainer"]["logger"].append("mine")
    assert verl.defaults("head", "ppo_trainer")["trainer"]["logger"] == ["console", "wandb"]
    verl._table.cache_clear()
    started = time.process_time()
    verl.defaults("0.9.1", "fully_async_ppo_megatron_trainer")
    assert time.process_time() - started < 0.06


SCALARS = [
    key
    for key, value in flat(verl.defaults("head", "ppo_trainer")).items()
    if isinstance(value, int | float | str) and "${" not in str(value)
]


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(SCALARS), st.integers(0, 10**6) | st.booleans() | st.none(), max_size=6))
def test_composing_the_result_again_changes_nothing(changes: dict[str, Any]) -> None:
    """compose(overrides), written out as `++key=value` of every leaf, composes to itself."""
    changes.pop("model_engine", None)
    once = of(*(f"{key}={'null' if value is None else str(value).lower()}" for key, value in changes.items()))
    again = compose(Launch(whole=once.leaves), "head")
    assert again.leaves == once.leaves
    assert {key: once.leaves[key] for key in changes} == changes
