"""Rollout correction over the samples of one step: of those that are kept, and with an error where nothing is left to learn."""

import torch
from torch import Tensor

from flowledger.config.algorithm import RolloutCorrection
from flowledger.flow.errors import BadInput
from flowledger.run.algorithms import rollout_correction
from flowledger.run.algorithms.rollout_correction import Correction


def corrected(
    *,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    loss_mask: Tensor,
    settings: RolloutCorrection,
    weighted: bool = True,
) -> Correction:
    """Weights and mask, each [B_prompt*G, S_resp] as what goes in. Dropped samples are in no figure.

    Raises BadInput where every token is rejected, or where every token weighs 0 and the weights go onto the loss
    (`weighted`).
    """
    kept = loss_mask.any(-1)
    made = rollout_correction.correct(
        old_log_prob=old_log_prob[kept], rollout_log_prob=rollout_log_prob[kept], loss_mask=loss_mask[kept],
        settings=settings,
    )  # fmt: skip
    weights, mask = made.rollout_is_weights, made.loss_mask
    if not mask.any():
        raise BadInput(_all_rejected(settings))
    if weighted and weights is not None and not weights[mask.bool()].any():
        raise BadInput(_all_weightless(settings))
    return Correction(
        rollout_is_weights=None if weights is None else _spread(weights, kept),
        loss_mask=_spread(mask, kept),
        metrics=made.metrics,
    )


def _spread(rows: Tensor, kept: Tensor) -> Tensor:
    """Rows of the kept samples [B_kept, S_resp] at their places among all [B_prompt*G, S_resp]; 0 elsewhere."""
    whole = torch.zeros(len(kept), rows.shape[1], dtype=rows.dtype, device=rows.device)
    whole[kept] = rows
    return whole


def _all_rejected(settings: RolloutCorrection) -> str:
    kinds = ", ".join(f"{one.kind} (high = {one.high})" for one in settings.rejections)
    return (
        f"algorithm.rollout_correction.rejections rejected every token of this step: {kinds}; raise `high`, or see why "
        "the rollout's log-probs differ from the trainer's"
    )


def _all_weightless(settings: RolloutCorrection) -> str:
    bounds = f"low = {settings.low}, high = {settings.high}"
    return (
        f"algorithm.rollout_correction.importance = {settings.importance!r} gives every token of this step the weight 0 "
        f"({bounds}): nothing to learn from; widen them around 1, or see why the rollout's log-probs differ from the "
        "trainer's"
    )
