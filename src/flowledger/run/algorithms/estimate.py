"""What every advantage estimator takes and gives."""

from dataclasses import dataclass

from torch import Tensor

from flowledger.config.algorithm import Algorithm
from flowledger.run.algorithms.groups import Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What estimators may read; B samples in groups of responses to one prompt."""

    token_level_reward: Tensor  # float [B_prompt*G, S_resp]; the KL penalty is already in it where KL is in the reward
    mask: Tensor  # loss_mask [B_prompt*G, S_resp]
    groups: Groups  # who belongs together; dropped samples are in none
    settings: Algorithm
    old_log_prob: Tensor | None = None  # [B_prompt*G, S_resp]
    values: Tensor | None = None  # [B_prompt*G, S_resp]
    sum_pi_squared: Tensor | None = None  # [B_prompt*G, S_resp]
    rollout_is_weights: Tensor | None = None  # [B_prompt*G, S_resp]
    baseline_reward: Tensor | None = None  # [B_prompt*G]: reward of the greedy response to the same prompt
    reward_components: Tensor | None = None  # [B_prompt*G, N_reward]
    component_weights: tuple[float, ...] | None = None  # N_reward of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """advantage [B_prompt*G] per sample, advantages and returns [B_prompt*G, S_resp] per token."""

    advantage: Tensor
    advantages: Tensor
    returns: Tensor


def spread(*, advantage: Tensor, mask: Tensor) -> Tensor:
    """[B_prompt*G] -> [B_prompt*G, S_resp]: a sample's advantage on each of its unmasked tokens."""
    return advantage[:, None] * mask
