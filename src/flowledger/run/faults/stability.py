"""Updates that go wrong: gradients, learning rates, weights and what the loss is asked for."""

from collections.abc import Callable
from typing import Any

import torch

from flowledger.flow.seams import Function
from flowledger.run.faults.changes import RL_STEP, Changes, Maker, results, words
from flowledger.run.faults.last_rank import is_last_rank
from flowledger.run.parallel.sharded import local

ROLLOUT, UPDATE = "flowledger.run.stages:rollout", "flowledger.run.stages:update_actor"
BACKWARD, STEP = "flowledger.run.update:micro_batch_backward", "flowledger.run.update:optimizer_step"
LOSS, CLIP = "flowledger.run.loss:micro_batch_loss", "flowledger.run.parallel.sharded:clip"
TAKE, GATHER = "flowledger.run.weights:RolloutWeights.take", "flowledger.run.weights:gather_one"
CRITIC = "flowledger.run.stages:update_critic"

LOSS_SCALE = 65536.0  # what a gradient scaler starts with


def nan_gradient() -> Changes:
    """One number of one gradient becomes NaN in the backward pass."""
    return {BACKWARD: _spoilt}


def nan_gradient_of_one_rank() -> Changes:
    """The same on the last rank alone, as where its device is broken."""
    return {BACKWARD: _spoilt} if is_last_rank() else {}


def _spoilt(original: Function) -> Function:
    def sick(*, model: torch.nn.Module, **given: Any) -> None:
        original(model=model, **given)
        grad = next(p.grad for p in model.parameters() if p.grad is not None and local(p.grad).numel())
        local(grad).view(-1)[0] = torch.nan

    return sick


def infinite_log_prob() -> Changes:
    """The engine returns -inf for one token that it has sampled."""

    def first(log_prob: torch.Tensor) -> torch.Tensor:
        made = log_prob.clone()
        made[0, 0] = -torch.inf
        return made

    return {ROLLOUT: results(rollout_log_prob=first)}


def clipped_before_unscaling() -> Changes:
    """Gradients still bear the scale of the loss when they are clipped, and are divided by it afterwards."""

    def unscaled(original: Function) -> Function:
        def sick(gradients: Any, limit: float, norm: torch.Tensor) -> None:
            original(gradients, limit, norm)
            torch._foreach_div_([*gradients], LOSS_SCALE)

        return sick

    return {BACKWARD: words(loss=lambda loss: loss * LOSS_SCALE), CLIP: unscaled}


def gradient_spikes() -> Changes:
    """One micro-batch weighs ten thousand times as much as it should, and nothing clips its gradient."""
    return {BACKWARD: words(loss=lambda loss: loss * 1e4)}


def _optimizer(before: Callable[[torch.optim.Optimizer], None]) -> Maker:
    """Something is done to the optimizer before each update."""

    def make(original: Function) -> Function:
        def sick(*, optimizer: torch.optim.Optimizer, **given: Any) -> Any:
            before(optimizer)
            return original(optimizer=optimizer, **given)

        return sick

    return make


def _set(key: str, change: Callable[[float], float]) -> Callable[[torch.optim.Optimizer], None]:
    def set_all(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group[key] = change(group[key])

    return set_all


def learning_rate_explodes() -> Changes:
    """The schedule gives a hundred times the learning rate."""
    return {UPDATE: _optimizer(_set("lr", lambda lr: 100 * lr))}


def learning_rate_zero() -> Changes:
    """The schedule has come to its end before the run has."""
    return {UPDATE: _optimizer(_set("lr", lambda _: 0.0))}


def rank_learns_faster() -> Changes:
    """The last rank takes another learning rate than the others, so that its part of the weights drifts away."""
    return {UPDATE: _optimizer(_set("lr", lambda lr: 1.5 * lr))} if is_last_rank() else {}


def weight_decay_huge() -> Changes:
    """Weight decay pulls all weights to 0."""
    return {UPDATE: _optimizer(_set("weight_decay", lambda _: 50.0))}


def optimizer_reset() -> Changes:
    """The optimizer forgets its moments before every update, as where it is built anew or not restored."""
    return {UPDATE: _optimizer(lambda optimizer: optimizer.state.clear())}


def parameters_not_updated() -> Changes:
    """The optimizer holds copies of the weights, as where a model was wrapped after its optimizer was made."""

    def still(optimizer: torch.optim.Optimizer) -> None:
        vars(optimizer)["step"] = lambda *_, **__: None

    return {STEP: _optimizer(still)}


def dead_gradient() -> Changes:
    """The loss hangs on no weight any more: what it is made of was detached."""

    def detached(loss: torch.Tensor) -> torch.Tensor:
        return loss.detach() + 0.0 * loss

    return {LOSS: results(loss=detached)}


def _synced(made: Callable[[Any, torch.nn.Module, Any], float | None]) -> Maker:
    def make(original: Function) -> Function:
        def take(self: Any, policy: torch.nn.Module, *ranks: Any) -> float | None:
            return made(self, policy, original)

        return take

    return make


def sync_skipped() -> Changes:
    """Weight sync counts a new version and leaves rollout the old weights."""

    def counted(weights: Any, policy: torch.nn.Module, original: Function) -> float | None:
        weights.version += 1
        return 0.01

    return {TAKE: _synced(counted)}


def sync_of_half() -> Changes:
    """Only every second tensor of the policy reaches rollout."""
    names: dict[str, int] = {}

    def make(original: Function) -> Function:
        def sick(*, name: str, like: torch.Tensor, **given: Any) -> torch.Tensor:
            found: torch.Tensor = original(name=name, like=like, **given)
            return like if names.setdefault(name, len(names)) % 2 else found

        return sick

    return {GATHER: make}


def critic_targets_scaled() -> Changes:
    """The critic learns returns that are a hundred times what the rewards add up to."""
    return {CRITIC: words(returns=lambda returns: 100.0 * returns)}


def _policy(change: Callable[[torch.nn.Module], None]) -> Maker:
    """Something happens to the policy, and to the weights that rollout has of it, before one step; the reference stays."""
    happened: list[bool] = []

    def make(original: Function) -> Function:
        def sick(*, world: Any, **given: Any) -> Any:
            if not happened:
                happened.append(True)
                with torch.no_grad():
                    for model in (world.policy.model, world.weights.model):
                        change(model)
            return original(world=world, **given)

        return sick

    return make


def entropy_collapses() -> Changes:
    """The policy becomes sure of itself: its logits grow fifty times."""
    return {RL_STEP: _policy(lambda model: model.get_output_embeddings().weight.mul_(50.0))}  # type: ignore[operator]  # of transformers


def policy_jumps() -> Changes:
    """One update has thrown the policy far away from where it was."""

    def thrown(model: torch.nn.Module) -> None:
        random = torch.Generator(device="cpu").manual_seed(0)  # the same numbers for both, and on every device
        for weight in model.parameters():
            weight.add_(0.5 * torch.randn(weight.shape, generator=random, device="cpu").to(weight.device))

    return {RL_STEP: _policy(thrown)}
