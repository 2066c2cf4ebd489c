"""Masks that do not lie on the tokens that they are meant for."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowledger.flow.seams import Function
from flowledger.run.batches import Rollouts
from flowledger.run.faults.changes import Changes, results, words
from flowledger.run.responses import STOP

ROLLOUT, FILTER = "flowledger.run.stages:rollout", "flowledger.run.stages:filter"


def moved(values: Tensor, by: int) -> Tensor:
    """Values [B, S_resp] moved along their tokens; what leaves one end is lost, and 0 comes in at the other."""
    made = torch.roll(values, by, dims=-1)
    made[..., slice(0, by) if by > 0 else slice(by, None)] = 0
    return made


def response_mask_right() -> Changes:
    """The first token of each response is left out, one behind it is let in."""
    return {ROLLOUT: results(response_mask=lambda mask: moved(mask, 1))}


def response_mask_left() -> Changes:
    """The last token of each response is left out."""
    return {ROLLOUT: results(response_mask=lambda mask: moved(mask, -1))}


def loss_mask_right() -> Changes:
    """As `response_mask_right`, where samples are filtered."""
    return {FILTER: results(loss_mask=lambda mask: moved(mask, 1))}


def loss_mask_left() -> Changes:
    """As `response_mask_left`, where samples are filtered."""
    return {FILTER: results(loss_mask=lambda mask: moved(mask, -1))}


def loss_mask_in_update() -> Changes:
    """The mask is right until the loss, which takes it one token late."""
    return {"flowledger.run.loss:micro_batch_loss": words(loss_mask=lambda mask: moved(mask, 1))}


def _rollouts(change: Any) -> Changes:
    def make(original: Function) -> Function:
        def rollout(**given: Any) -> Rollouts:
            made: Rollouts = change(original(**given))
            return made

        return rollout

    return {ROLLOUT: make}


def prompt_in_loss() -> Changes:
    """Responses begin one column early: the last token of the prompt is taken for one that the policy chose."""

    def wider(made: Rollouts) -> Rollouts:
        width, one = made.response_mask.shape[1] + 1, torch.ones_like(made.response_mask[:, :1])
        return replace(
            made,
            response_ids=made.full_sequence[:, -width:],
            response_mask=torch.cat([one, made.response_mask], 1),
            rollout_log_prob=torch.cat([torch.zeros_like(made.rollout_log_prob[:, :1]), made.rollout_log_prob], 1),
        )

    return _rollouts(wider)


def environment_in_loss() -> Changes:
    """What the environment wrote counts as chosen by the policy."""

    def all_of_it(made: Rollouts) -> Rollouts:
        return replace(made, response_mask=made.attention_mask[:, -made.response_mask.shape[1] :])

    return _rollouts(all_of_it)


def end_token_masked() -> Changes:
    """The token that ends a response is not trained on, so the policy never learns to stop."""

    def without_end(made: Rollouts) -> Rollouts:
        mask = made.response_mask.clone()
        columns = torch.arange(mask.shape[1], device=mask.device)
        last = (mask * columns).amax(-1)
        stopped = made.finish_reason == STOP
        mask[stopped, last[stopped]] = 0
        return replace(made, response_mask=mask)

    return _rollouts(without_end)


def padding_in_loss() -> Changes:
    """Every place of a response counts, padding too."""
    return {FILTER: results(loss_mask=torch.ones_like)}


def dropped_in_loss() -> Changes:
    """Samples that were dropped keep their loss mask, and count in what the loss is divided by."""

    def make(original: Function) -> Function:
        def filtered(**given: Any) -> Any:
            return replace(original(**given), loss_mask=given["response_mask"].clone())

        return filtered

    return {FILTER: make}


def padding_attended() -> Changes:
    """Forward passes attend to padding: their attention mask is 1 everywhere."""
    return {"flowledger.run.forward:micro_batch_forward": words(attention_mask=torch.ones_like)}
