"""Where tensors live: the loop on a second device (played by the CPU, see second_device), and which device is chosen."""

from typing import Any

import pytest
import torch

from flowledger.config.engine import Mesh
from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput
from flowledger.run import device, loop
from flowledger.run.parallel.ranks import join
from flowledger.run.stages import prompt
from flowledger.run.world import World
from tests.run import second_device, worlds
from tests.run.second_device import DEVICE, Elsewhere, Mixed

SMALL = {"tiny": {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_size": 16}}
SHORT = {"samples_per_prompt": 2, "max_response_tokens": 3}
TOKEN_MODEL = {"components": [{"name": "judge", "kind": "token_model", "path": "tiny"}]}
# What a step goes through: every stage, both kinds of passes, rewards by rules and by models.
STEPS: dict[str, dict[str, Any]] = {
    "reference, several chunks of logits, rejection": {
        "ref": {"path": "start"},
        "algorithm": {
            "advantage": "grpo", "kl_in": "loss", "entropy_coef": 0.01,
            "rollout_correction": {"importance": "token", "rejections": [{"kind": "token_k2", "high": 5.0}]},
        },
        "actor": {"log_prob_chunk_tokens": 2, "old_log_prob": True}, "optim": {"lr": 0.001, "warmup_steps": 2},
    },
    "critic, KL in the reward, recomputed activations, two epochs": {
        "critic": {"path": "start"}, "ref": {"path": "start"}, "algorithm": {"advantage": "gae", "kl_in": "reward"},
        "actor": {"epochs": 2, "activation_checkpointing": True, "mini_batch_prompts": 1},
    },
    "greedy baseline, adapters, padded passes, a reward model, few slots": {
        "model": {"lora": {"rank": 2}}, "algorithm": {"advantage": "remax"}, "actor": {"packed": False},
        "reward": TOKEN_MODEL, "rollout": {"max_running": 2, "top_k": 5, "top_p": 0.9, "temperature": 0.7},
    },
}  # fmt: skip


def config(changes: dict[str, Any]) -> RunConfig:
    sections: dict[str, Any] = {"model": SMALL, "rollout": SHORT}
    return worlds.config(**{**sections, **{name: {**sections.get(name, {}), **part} for name, part in changes.items()}})


def stepped(settings: RunConfig) -> tuple[World, dict[str, float]]:
    """A run's world after one step, and its metrics without those of time."""
    with loop.prepared(settings) as world:
        metrics = loop.rl_step(step=0, world=world).metrics
    return world, {name: value for name, value in metrics.items() if name not in ("step_time_s", "tokens_per_s")}


@pytest.mark.parametrize("changes", STEPS.values(), ids=STEPS)
def test_a_step_mixes_no_devices_and_gives_the_numbers_of_the_cpu(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, expected = stepped(config(changes))
    monkeypatch.setattr(device, "chosen", lambda asked: DEVICE)
    with second_device.there():
        away, found = stepped(config(changes))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    weights = dict(away.policy.model.named_parameters())
    for name, weight in here.policy.model.named_parameters():
        torch.testing.assert_close(_numbers(weights[name]), weight.detach(), atol=1e-6, rtol=1e-4)
    assert not _at_home(away)


def _numbers(x: torch.Tensor) -> torch.Tensor:
    assert isinstance(x, Elsewhere)
    return x.held.detach()


def _at_home(world: World) -> set[str]:
    """What of a world's models and optimizers is on the CPU."""
    models: dict[str, Any] = {"policy": world.policy.model, "rollout": world.weights.model}
    optimizers = {"policy": world.optimizer}
    if world.reference:
        models["reference"] = world.reference.model
    if world.critic:
        models["critic"], optimizers["critic"] = world.critic.model, world.critic.optimizer
    tensors = [(name, x) for name, model in models.items() for x in (*model.parameters(), *model.buffers())]
    states = [(name, x) for name, one in optimizers.items() for state in one.state.values() for x in state.values()]
    return {name for name, x in tensors + states if not isinstance(x, Elsewhere)}


def test_what_python_reads_stays_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "chosen", lambda asked: DEVICE)
    with second_device.there(), loop.prepared(config({})) as world:
        made = prompt(
            source=world.source, tokenizer=world.policy.tokenizer, data=world.config.data, step=0,
            samples_per_prompt=2, ranks=world.ranks,
        )  # fmt: skip
        assert {made.sample_id.device.type, world.generator.device.type} == {"cpu"}
        there = (made.prompt_ids, made.attention_mask, made.position_ids, made.prompt_length, made.group_id)
        assert {x.device for x in there} == {DEVICE}


def test_the_second_device_refuses_what_a_gpu_refuses() -> None:
    with second_device.there():
        away, home = torch.ones(3, device=DEVICE), torch.ones(3)
        rows = torch.tensor([0, 2])
        for wrong in (
            lambda: away + home, lambda: torch.cat([away, home]), lambda: torch.where(home > 0, away, away),
            lambda: home[rows.to(DEVICE)], lambda: away.copy_(home), lambda: torch.stack([away.sum(), home.sum()]),
            lambda: torch.einsum("a,a->", away, home), lambda: away.index_select(0, rows),
        ):  # fmt: skip
            with pytest.raises(Mixed):
                wrong()
        assert (away + home.sum()).tolist() == [4.0] * 3  # a scalar
        assert away[rows].tolist() == away[home > 0][:2].tolist() == (away + home.to(DEVICE))[:2].sub(1).tolist()


@pytest.mark.parametrize(
    ("asked", "gpus", "processes", "group", "found"),
    [
        ("auto", 0, 1, None, "cpu"), ("auto", 1, 1, None, "cuda:1"), ("auto", 4, 4, "cpu:gloo,cuda:nccl", "cuda:1"),
        ("auto", 2, 4, None, "cpu"), ("auto", 4, 4, "cpu:gloo,cuda:gloo", "cpu"), ("cpu", 4, 1, None, "cpu"),
        ("cuda", 2, 2, None, "cuda:1"), ("cuda", 0, 1, None, "device = cuda and torch finds no GPU here; use device = cpu"),
        ("cuda", 2, 4, None, "device = cuda and torch finds 2 GPUs for the 4 processes of this machine; use device = auto"),
    ],
)  # fmt: skip
def test_the_device_of_a_process(
    asked: device.Asked, gpus: int, processes: int, group: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(device.dist, "is_initialized", lambda: group is not None)
    monkeypatch.setattr(device.dist, "get_backend_config", lambda: group)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setenv("LOCAL_RANK", "1")
    if found.startswith("device = "):
        with pytest.raises(BadInput) as caught:
            device.chosen(asked)
        assert str(caught.value) == found
        return
    assert str(device.chosen(asked)) == found
    assert [str(one) for one in current] == ([found] if found != "cpu" else [])


def test_one_process_has_a_device_too() -> None:
    ranks = join(Mesh(), torch.device("cuda", 0))
    assert (ranks.size, str(ranks.device)) == (1, "cuda:0")
