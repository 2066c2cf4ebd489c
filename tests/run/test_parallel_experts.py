"""Experts dealt to ranks, held against transformers' own experts and against the same step on one process."""

from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from flowledger.config.engine import Mesh
from flowledger.config.schema import RunConfig, Tiny
from flowledger.flow.errors import BadInput
from flowledger.run import decode, forward, loop, models, tiny
from flowledger.run.parallel import experts, ranks, sharded
from tests.run import worlds

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SIZES: dict[str, Any] = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_size": 48, "experts": 4}
LR = 1e-3


def moe(**changes: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tiny.causal_lm(Tiny(**SIZES | changes)).eval()


# --- One layer: the same tokens, the same choices ---

# Who chooses whom: experts of each of a rank's tokens, [T, 2] of 4; a rank has some tokens, one, or none for its neighbour.
CHOICES = {
    "mixed": ([[0, 3], [2, 1], [1, 3], [0, 2]], [[3, 0], [1, 2], [2, 0]]),
    "all to the first rank": ([[0, 1], [1, 0]], [[1, 0], [0, 1], [0, 1]]),
    "each to the other": ([[2, 3], [3, 2]], [[0, 1]]),
    "one expert is never chosen": ([[0, 1], [1, 2]], [[2, 0], [1, 0]]),
}


def one_layer(choice: tuple[list[list[int]], ...], at: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [T, H], choices and weights [T, 2] of one rank."""
    drawn = torch.Generator().manual_seed(at)
    chosen = torch.tensor(choice[at])
    hidden, weights = torch.randn(len(chosen), 32, generator=drawn), torch.rand(len(chosen), 2, generator=drawn)
    return hidden.requires_grad_(), chosen, weights.requires_grad_()


def on_two_ranks() -> dict[tuple[str, str], dict[str, Tensor]]:
    model, here = moe(), ranks.join(Mesh(dp=2, ep=2))
    sharded.cut(model, here)
    layer, found = model.model.layers[0].mlp.experts, {}
    for way in (
        "eager",
        "grouped_mm",
    ):  # transformers' loop over the experts that were chosen, and what it runs by itself
        model.set_experts_implementation(way)
        found |= {(way, name): parts(layer, [one_layer(choice, here.rank)])[0] for name, choice in CHOICES.items()}
    return found


def parts(layer: Any, inputs: list[tuple[Tensor, Tensor, Tensor]]) -> list[dict[str, Tensor]]:
    """Of each input what a layer's experts make of it and its gradients, and those of all of them to the weights."""
    layer.zero_grad()
    made = [layer(*each) for each in inputs]
    sum(x.square().sum() for x in made).backward()  # type: ignore[union-attr]  # there is at least one
    weights = {name: sharded.whole(p.grad) for name, p in layer.named_parameters()}
    found = zip(made, inputs, strict=True)
    return [{"made": x.detach(), "hidden": h.grad, "weights": w.grad} | weights for x, (h, _, w) in found]


def test_tokens_are_computed_as_transformers_computes_them(forked: ModuleType) -> None:
    model = moe()
    model.set_experts_implementation("eager")
    layer = model.model.layers[0].mlp.experts
    expected = {name: parts(layer, [one_layer(choice, at) for at in range(2)]) for name, choice in CHOICES.items()}
    for at, found in enumerate(forked.ranks(2, on_two_ranks, timeout_s=30)):
        for (way, name), values in found.items():
            for key, value in expected[name][at].items():
                where = f"{way}, {name}, rank {at}: {key}"
                torch.testing.assert_close(values[key], value, atol=1e-6, rtol=1e-5, msg=where)


# --- What each rank holds ---


def held(mesh: Mesh, number: int) -> dict[str, tuple[tuple[int, ...], Tensor]]:
    model = moe(experts=number)
    sharded.cut(model, ranks.join(mesh))
    layer = model.model.layers[1].mlp.experts
    return {n: (tuple(sharded.local(p).shape), sharded.whole(p).detach()) for n, p in layer.named_parameters()}


def test_a_rank_keeps_its_experts_and_all_of_them_are_the_model(forked: ModuleType) -> None:
    whole = dict(moe(experts=6).model.layers[1].mlp.experts.named_parameters())
    found = forked.ranks(4, held, Mesh(dp=4, ep=2), 6)
    kept = [2, 2, 1, 1]  # ranks 0 and 2 share the first three experts, 1 and 3 the others
    assert [rank["down_proj"][0] for rank in found] == [(n, 32, 48) for n in kept]
    assert [rank["gate_up_proj"][0] for rank in found] == [(n, 96, 32) for n in kept]
    for rank in found:
        assert all(torch.equal(rank[name][1], weight) for name, weight in whole.items())


# --- One pass, of which a rank has nothing ---


def gradients(mesh: Mesh, empty: tuple[int, ...]) -> dict[str, Tensor]:
    """Of the sum of log-probs of two samples a rank, none on the ranks `empty`, with activation checkpointing."""
    model, here = moe(), ranks.join(mesh)
    forward.use_segments(model)
    models.recompute_activations(model)
    sharded.cut(model, here)
    ids = (
        torch.cat([samples(rank) for rank in range(mesh.dp) if rank not in empty])
        if here.size == 1
        else samples(here.rank)
    )
    ids = ids[: 0 if here.size > 1 and here.rank in empty else None]
    mask = torch.ones_like(ids)
    made = forward.micro_batch_forward(
        model=model, full_sequence=ids, attention_mask=mask, position_ids=mask.cumsum(1) - 1, response_mask=mask[:, 3:],
        temperature=1.0, packed=True, chunk_tokens=0, ranks=here,
    )  # fmt: skip
    made.new_log_prob.sum().backward()
    return {name: sharded.whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def samples(rank: int) -> Tensor:
    return torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(rank))


def alone(dp: int, empty: tuple[int, ...]) -> dict[str, Tensor]:
    """The same of all samples at once, by transformers' own forward, padded and without checkpointing."""
    model = moe()
    ids = torch.cat([samples(rank) for rank in range(dp) if rank not in empty])
    log_probs = model(input_ids=ids).logits[:, 2:-1].log_softmax(-1).gather(-1, ids[:, 3:, None])
    log_probs.sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(("mesh", "empty"), [(Mesh(dp=2, ep=2), (1,)), (Mesh(dp=4, ep=2), (0, 2))])
def test_a_rank_without_samples_holds_nobody_up(mesh: Mesh, empty: tuple[int, ...], forked: ModuleType) -> None:
    expected = alone(mesh.dp, empty)
    for found in forked.ranks(mesh.dp, gradients, mesh, empty, timeout_s=30):
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, atol=1e-5 * float(grad.abs().max()), rtol=0, msg=name)


# --- A step of the loop ---


def run(**changes: Any) -> RunConfig:
    sections: dict[str, Any] = {
        "model": {"tiny": SIZES}, "data": {"prompts_per_step": 4}, "rollout": {"samples_per_prompt": 4},
        "actor": {"micro_batch": {"samples": 2}}, "ref": {"path": "start"},
        "algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01, "advantage": "remax"}, "optim": {"lr": LR},
    }  # fmt: skip
    return worlds.config(**sections | changes)


@cache
def one_process(equality: ModuleType) -> Any:
    return equality.step(run())


@pytest.mark.parametrize(
    ("mesh", "recomputed"),
    [({"dp": 2}, False), ({"dp": 2, "ep": 2}, True), ({"dp": 4, "ep": 2}, False), ({"dp": 4, "ep": 4}, False)],
)
def test_a_step_is_that_of_one_process(
    mesh: dict[str, int], recomputed: bool, forked: ModuleType, equality: ModuleType
) -> None:
    one = one_process(equality)
    assert float(one.gradients[0]["model.layers.0.mlp.gate.weight"].abs().max()) > 1e-5  # the router learns
    config = run(mesh=mesh, actor={"micro_batch": {"samples": 2}, "activation_checkpointing": recomputed})
    for trace in forked.ranks(mesh["dp"], equality.step, config):
        gap = equality.gap(one, trace, LR)
        assert gap.loss < 1e-5 and gap.grad < 1e-5 and gap.weight_over_lr < 1e-2, gap


def test_rollout_and_training_see_the_same_mixture() -> None:
    with loop.prepared(run()) as world:
        assert world.policy.sizes["E"] == 4
        assert decode.decoder_of(world.weights.model, positions=8) is None  # the fast decoder knows no experts
        (report,) = loop.train(world)
    assert 0 < report.metrics["rollout_gap/max"] < 1e-5


# --- What cannot be dealt ---


def test_experts_that_cannot_be_dealt_are_refused() -> None:
    three = ranks.Ranks(size=3, groups={**ranks.ALONE.groups, "ep": ranks.Group("ep", (0, 1, 2))})
    with pytest.raises(BadInput, match=r"mesh\.ep = 3 does not divide the 4 experts of a layer; use mesh.ep = 2"):
        experts.cut(moe(), three)
    model = moe(experts=3)
    model.model.layers[0].mlp.experts.norm = torch.nn.LayerNorm(32)
    with pytest.raises(BadInput, match=r"mesh\.ep = 3: the experts of this model share a weight; use mesh.ep = 1"):
        experts.cut(model, three)


def test_a_token_has_no_more_experts_than_there_are() -> None:
    with pytest.raises(ValueError, match="experts_per_token = 3 of experts = 2; use at most 2"):
        Tiny(experts=2, experts_per_token=3)
    Tiny(experts=3, experts_per_token=3)
