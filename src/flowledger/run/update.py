"""The update of the policy: epochs, mini-batches (one optimizer step each), micro-batches (one forward and backward each).

Every function here is also a seam: it is called by its global name with keyword arguments, so it can be watched or
replaced from outside. Normalisers are those of the mini-batch and are handed down, never computed from a micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput
from flowledger.run import forward
from flowledger.run.batching import Batches, Indices, MiniBatch
from flowledger.run.losses import AGGREGATION_WEIGHTS, KL_FORMS, POLICY_LOSSES, LossInputs, Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoss:
    """The loss of one micro-batch; all matrices [B_micro, S_resp], losses are its share of the mini-batch's."""

    loss: Tensor  # [] what backward starts from
    policy_loss: Tensor  # []
    kl_loss: Tensor  # []
    entropy_loss: Tensor  # []
    loss_mat: Tensor
    ratio: Tensor
    clipped: Tensor
    loss_share: Tensor  # weight * loss_mat: sums to policy_loss
    kl: Tensor | None


@dataclass(slots=True, kw_only=True)
class Sums:
    """What the update adds up over micro-batches, weighted by tokens where it is a mean over tokens."""

    tokens: float = 0.0
    totals: dict[str, float] = field(default_factory=dict)
    ratio_max: float = 0.0

    def add(self, made: MicroBatchLoss, entropy: Tensor, old: Tensor, new: Tensor, mask: Tensor) -> None:
        kept = mask.bool()
        self.tokens += float(kept.sum())
        policy_kl = (old - new.detach())[kept].sum()
        means = {
            "clip_ratio": made.clipped[kept].sum(),
            "entropy": entropy.detach()[kept].sum(),
            "policy_kl": policy_kl,
        }
        if made.kl is not None:
            means["ref_kl"] = made.kl.detach()[kept].sum()
        for name, value in means.items():
            self.totals[name] = self.totals.get(name, 0.0) + float(value)
        self.ratio_max = max(self.ratio_max, float(made.ratio[kept].max()))

    def metrics(self) -> dict[str, float]:
        """Means over all tokens that went through the update."""
        return {name: total / max(self.tokens, 1.0) for name, total in self.totals.items()} | {
            "ratio/max": self.ratio_max
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one optimizer step came to, each []."""

    policy_loss: Tensor
    kl_loss: Tensor
    entropy_loss: Tensor
    grad_norm: Tensor


Columns = Mapping[str, Tensor]  # the step's tensors by flow name, each with B rows


def epoch(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    batches: Batches,
    columns: Columns,
    sums: Sums,
) -> list[Step]:
    """One pass over all samples: one optimizer step per mini-batch that has something to learn from."""
    return [
        mini_batch(model=model, optimizer=optimizer, config=config, batch=batch, columns=columns, sums=sums)
        for batch in batches.mini_batches
        if batch.micro_batches
    ]


def mini_batch(
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    batch: MiniBatch,
    columns: Columns,
    sums: Sums,
) -> Step:
    """Accumulate the gradient over micro-batches, then step once."""
    mask = columns["loss_mask"][list(batch.samples)]
    totals = Totals(
        tokens=int(mask.sum()),
        sequences=int((mask.sum(-1) > 0).sum()),
        horizon=config.algorithm.loss_scale_factor or config.rollout.max_response_tokens,
    )
    parts = []
    for samples in batch.micro_batches:
        rows = rows_of(columns, samples)
        parts.append(micro_batch(model=model, config=config, totals=totals, sums=sums, **rows))
    policy_loss, kl_loss, entropy_loss = torch.stack(parts).sum(0)
    grad_norm = optimizer_step(model=model, optimizer=optimizer, grad_clip=config.actor.grad_clip)
    return Step(policy_loss=policy_loss, kl_loss=kl_loss, entropy_loss=entropy_loss, grad_norm=grad_norm)


def micro_batch(
    *,
    model: nn.Module,
    config: RunConfig,
    totals: Totals,
    sums: Sums,
    sample_id: Tensor,
    full_sequence: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_mask: Tensor,
    loss_mask: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    ref_log_prob: Tensor | None = None,
) -> Tensor:
    """Forward, loss, backward of one micro-batch; returns its policy, KL and entropy loss [3]."""
    new = forward.micro_batch_forward(
        model=model,
        full_sequence=full_sequence,
        attention_mask=attention_mask,
        position_ids=position_ids,
        response_mask=response_mask,
        temperature=config.rollout.temperature,
        packed=config.actor.packed,
        chunk_tokens=config.actor.log_prob_chunk_tokens,
        entropy_grad=config.algorithm.entropy_coef != 0,
    )
    made = micro_batch_loss(
        config=config,
        totals=totals,
        sample_id=sample_id,
        new_log_prob=new.new_log_prob,
        entropy=new.entropy,
        old_log_prob=old_log_prob,
        ref_log_prob=ref_log_prob,
        advantages=advantages,
        loss_mask=loss_mask,
    )
    micro_batch_backward(model=model, loss=made.loss)
    sums.add(made, new.entropy, old_log_prob, new.new_log_prob, loss_mask)
    return torch.stack([made.policy_loss, made.kl_loss, made.entropy_loss]).detach()


def micro_batch_loss(
    *,
    config: RunConfig,
    totals: Totals,
    sample_id: Tensor,
    new_log_prob: Tensor,
    entropy: Tensor,
    old_log_prob: Tensor,
    ref_log_prob: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
) -> MicroBatchLoss:
    """This micro-batch's share of the mini-batch's loss: policy + kl_coef * KL - entropy_coef * entropy."""
    algorithm = config.algorithm
    weight = AGGREGATION_WEIGHTS[algorithm.loss_aggregation](loss_mask, totals)
    inputs = LossInputs(
        new_log_prob=new_log_prob, old_log_prob=old_log_prob, advantages=advantages, mask=loss_mask, settings=algorithm
    )
    token = POLICY_LOSSES[algorithm.policy_loss](inputs)
    policy_loss = (weight * token.loss_mat).sum()
    entropy_loss = (weight * entropy).sum()
    kl = KL_FORMS[algorithm.kl_form](new_log_prob - ref_log_prob) if ref_log_prob is not None else None
    kl_loss = (weight * kl).sum() if kl is not None else policy_loss.new_zeros(())
    loss = policy_loss - algorithm.entropy_coef * entropy_loss if algorithm.entropy_coef else policy_loss
    if kl is not None and algorithm.kl_in == "loss":
        loss = loss + algorithm.kl_coef * kl_loss
    if not torch.isfinite(loss):
        raise BadInput(
            _not_finite(_made_before(new_log_prob, old_log_prob, ref_log_prob, advantages), loss_mask, sample_id)
        )
    return MicroBatchLoss(
        loss=loss,
        policy_loss=policy_loss.detach(),
        kl_loss=kl_loss.detach(),
        entropy_loss=entropy_loss.detach(),
        loss_mat=token.loss_mat.detach(),
        ratio=token.ratio,
        clipped=token.clipped,
        loss_share=(weight * token.loss_mat).detach(),
        kl=kl.detach() if kl is not None else None,
    )


def micro_batch_backward(*, model: nn.Module, loss: Tensor) -> None:
    """Add this micro-batch's gradient to what the mini-batch has so far."""
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def optimizer_step(*, model: nn.Module, optimizer: torch.optim.Optimizer, grad_clip: float) -> Tensor:
    """Clip the gradient, step, drop the gradient. Returns the gradient's norm [] before clipping; it must be finite."""
    trained = [p for p in model.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(trained, grad_clip)
    if not torch.isfinite(norm):
        names = [
            n for n, p in model.named_parameters() if p.grad is not None and not bool(torch.isfinite(p.grad).all())
        ]
        raise BadInput(
            f"grad_norm is {float(norm)}; the first gradient that is not finite: {names[0] if names else 'their sum'}"
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.detach()


def log_probs(*, model: nn.Module, config: RunConfig, batches: Batches, columns: Columns) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy [B_prompt*G, S_resp] without gradient, micro-batch by micro-batch; 0 for dropped samples."""
    shape = columns["response_mask"].shape
    log_prob, entropy = torch.zeros(shape), torch.zeros(shape)
    for samples in batches.micro_batches:
        made = log_prob_micro_batch(model=model, config=config, **rows_of(columns, samples))
        log_prob[list(samples)], entropy[list(samples)] = made.new_log_prob, made.entropy
    return log_prob, entropy


@torch.no_grad()
def log_prob_micro_batch(
    *,
    model: nn.Module,
    config: RunConfig,
    sample_id: Tensor,
    full_sequence: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_mask: Tensor,
) -> forward.Forward:
    """Log-probs of one micro-batch without gradient, for the old and the reference policy."""
    return forward.micro_batch_forward(
        model=model,
        full_sequence=full_sequence,
        attention_mask=attention_mask,
        position_ids=position_ids,
        response_mask=response_mask,
        temperature=config.rollout.temperature,
        packed=config.actor.packed,
        chunk_tokens=config.actor.log_prob_chunk_tokens,
    )


def rows_of(columns: Columns, samples: Indices | Sequence[int]) -> dict[str, Tensor]:
    """The rows of these samples, by flow name."""
    index = torch.as_tensor(samples)
    return {name: tensor[index.to(tensor.device)] for name, tensor in columns.items()}


def _made_before(
    new_log_prob: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor | None, advantages: Tensor
) -> dict[str, Tensor]:
    """The inputs of a loss in the order in which they are made, to name the first that went wrong."""
    made = {
        "advantages": advantages,
        "old_log_prob": old_log_prob,
        "ref_log_prob": ref_log_prob,
        "new_log_prob": new_log_prob,
    }
    return {name: tensor for name, tensor in made.items() if tensor is not None}


def _not_finite(inputs: Mapping[str, Tensor], mask: Tensor, sample_id: Tensor) -> str:
    for name, tensor in inputs.items():
        bad = ~torch.isfinite(tensor) & mask.bool()
        if bad.any():
            row, token = bad.nonzero()[0].tolist()
            return (
                f"the loss is not finite: {name} of sample {int(sample_id[row])}, response token {token} is "
                f"{float(tensor[row, token].detach())}; lower optim.lr or check the model's weights"
            )
    return "the loss is not finite although its inputs are; the log ratio overflows: lower optim.lr"
