"""A small job to be watched: stage functions in the manner of the loop, with a two-layer model. No tests here."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

KEPT: list[Any] = []  # where a leak would go


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    full_sequence: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    response_ids: Tensor
    finish_reason: Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


def step(*, step: int, model: Model, optimizer: Any, leak: bool = False, fail: str | None = None) -> dict[str, float]:
    ids = torch.arange(4) + 4 * step
    rolled = rollout(sample_id=ids, group_id=ids // 2, prompt_length=torch.tensor([2, 1]))
    loss = update_actor(model=model, optimizer=optimizer, batch=rolled, sample_id=ids, leak=leak, fail=fail)
    return {"loss": loss, "bad": float("nan")}


def rollout(*, sample_id: Tensor, group_id: Tensor, prompt_length: Tensor) -> Rollouts:
    response = torch.randint(0, 16, (4, 3))
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
    prompts = torch.tensor([[1, 2], [1, 2], [0, 3], [0, 3]])
    whole = torch.cat([(prompts > 0).long(), mask], 1)
    return Rollouts(
        full_sequence=torch.cat([prompts, response], 1), attention_mask=whole, response_mask=mask,
        response_ids=response, finish_reason=torch.tensor([1, 0, 2, 3]),
    )  # fmt: skip


def update_actor(
    *, model: Model, optimizer: Any, batch: Rollouts, sample_id: Tensor, leak: bool, fail: str | None
) -> float:
    losses = [mini_batch(model, optimizer, batch, sample_id, half, leak, fail) for half in (slice(0, 2), slice(2, 4))]
    return sum(losses)


def mini_batch(
    model: Model, optimizer: Any, batch: Rollouts, sample_id: Tensor, half: slice, leak: bool, fail: str | None
) -> float:
    total = 0.0
    for row in range(half.start, half.stop):
        total += micro_batch(
            model=model, full_sequence=batch.full_sequence[row : row + 1].clone(),
            sample_id=sample_id[row : row + 1], leak=leak, fail=fail,
        )  # fmt: skip
    optimizer_step(model, optimizer=optimizer)
    return total


def micro_batch(*, model: Model, full_sequence: Tensor, sample_id: Tensor, leak: bool, fail: str | None) -> float:
    new_log_prob = forward(model, full_sequence)
    if leak:
        KEPT.append({"log_probs": [new_log_prob]})
    loss = -new_log_prob.mean()
    if fail == "micro_batch":
        raise ValueError("as asked")
    backward(loss, model)
    return float(loss.detach())


def forward(model: Model, full_sequence: Tensor) -> Tensor:
    logits = model(full_sequence)[:, -4:-1]
    return logits.log_softmax(-1).gather(-1, full_sequence[:, -3:, None])[..., 0]


def backward(loss: Tensor, model: Model) -> None:
    loss.backward()


def optimizer_step(model: Model, optimizer: Any) -> Tensor:
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
