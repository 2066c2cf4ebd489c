"""Advantages of other samples, groups, tokens or steps."""

from typing import Any

import torch
from torch import Tensor

from flowledger.flow.seams import Function
from flowledger.run.faults.changes import Changes, results, words

ADVANTAGE, REWARD = "flowledger.run.stages:advantage", "flowledger.run.stages:reward"


def wrong_axis() -> Changes:
    """A number for each sample is laid along the tokens."""

    def make(original: Function) -> Function:
        def spread(*, advantage: Tensor, mask: Tensor) -> Tensor:
            columns = torch.arange(mask.shape[1], device=mask.device) % len(advantage)
            return advantage[columns][None, :] * mask

        return spread

    return {"flowledger.run.algorithms.estimate:spread": make}


def _swapped(first: int, second: int) -> Any:
    def swap(values: Tensor) -> Tensor:
        order = torch.arange(len(values), device=values.device)
        order[[first, second]] = order[[second, first]]
        return values[order]

    return swap


def rewards_swapped_in_group() -> Changes:
    """Between scoring and advantages the rewards of two samples of a group change places."""
    swap = _swapped(0, 1)
    return {ADVANTAGE: words(token_level_reward=swap, reward_components=swap)}


def rewards_swapped_across_groups() -> Changes:
    """The same of two samples of different groups, where they are scored."""
    swap = _swapped(0, 5)
    return {REWARD: results(token_level_reward=swap, reward_components=swap, reward=swap)}


def rewards_rolled() -> Changes:
    """The sums of the components stand one sample late; the components do not."""
    return {
        REWARD: results(reward=lambda values: values.roll(1, 0), token_level_reward=lambda values: values.roll(1, 0))
    }


def component_weights() -> Changes:
    """Every component weighs 1, whatever the settings say."""

    def make(original: Function) -> Function:
        def fuse(self: Any, per_token: Tensor, *args: Any) -> Any:
            before = self.settings
            ones = [component.model_copy(update={"weight": 1.0}) for component in before.components]
            self.settings = before.model_copy(update={"components": tuple(ones)})
            try:
                return original(self, per_token, *args)
            finally:
                self.settings = before

        return fuse

    return {"flowledger.run.rewards:Scorer._fuse": make}


def group_ids_tiled() -> Changes:
    """0 1 0 1 0 1 where 0 0 0 1 1 1 is meant."""

    def tiled(ids: Tensor) -> Tensor:
        groups: Tensor = torch.unique(ids)
        return groups.repeat(len(ids) // len(groups))

    return {"flowledger.run.stages:prompt": results(group_id=tiled)}


def normalised_over_batch() -> Changes:
    """All samples of the step are one group."""
    return {"flowledger.run.algorithms.groups:groups_of": words(group_id=torch.zeros_like)}


def not_divided_by_std() -> Changes:
    """`norm_by_std` has no effect."""

    def make(original: Function) -> Function:
        def std(rewards: Tensor) -> Tensor:
            return torch.ones_like(rewards[:, :1])

        return std

    return {"flowledger.run.algorithms.group_advantages:_std": make}


def stale_advantages() -> Changes:
    """The update gets the advantages of the step before."""
    kept: dict[str, Tensor] = {}

    def late(values: Tensor) -> Tensor:
        before = kept.get("last", values)
        kept["last"] = values
        width = min(before.shape[1], values.shape[1])
        made = torch.zeros_like(values)
        made[:, :width] = before[:, :width]
        return made

    return {ADVANTAGE: results(advantages=late)}


def values_not_masked() -> Changes:
    """GAE takes what the critic says of padding for the value of what comes next."""

    def make(original: Function) -> Function:
        def following(x: Tensor, mask: Tensor) -> Tensor:
            padded = torch.where(mask.bool(), x, 0.5)
            return torch.cat([padded[:, 1:], torch.full_like(x[:, :1], 0.5)], 1)

        return following

    return {"flowledger.run.algorithms.token_advantages:following": make}
