"""What each stage hands on. Field names are the flow's tensor names; B = B_prompt*G, sample index = prompt*G + k."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from flowledger.run.batching import Batches
from flowledger.run.parallel.rows import Rows
from flowledger.run.prompts import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The prompts of a step, left-padded."""

    prompt_ids: Tensor  # int64 [B_prompt, S_prompt]
    attention_mask: Tensor  # int64 [B_prompt, S_prompt]
    position_ids: Tensor  # int64 [B_prompt, S_prompt]
    prompt_length: Tensor  # int64 [B_prompt]
    sample_id: Tensor  # int64 [B_prompt*G]
    group_id: Tensor  # int64 [B_prompt*G]
    problems: tuple[Problem, ...]  # per prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The responses, right-padded, and the sequences they complete."""

    response_ids: Tensor  # int64 [B_prompt*G, S_resp]
    response_mask: Tensor  # int64 [B_prompt*G, S_resp], 1 on what the policy sampled
    full_sequence: Tensor  # int64 [B_prompt*G, S_prompt + S_resp]
    attention_mask: Tensor  # int64 [B_prompt*G, S_prompt + S_resp]
    position_ids: Tensor  # int64 [B_prompt*G, S_prompt + S_resp]
    rollout_log_prob: Tensor  # float32 [B_prompt*G, S_resp], 0 where response_mask is 0
    finish_reason: Tensor  # int64 [B_prompt*G], indices into flow.words.FINISH_REASONS
    turns: Tensor  # int64 [B_prompt*G], in which the policy spoke
    environment_errors: tuple[str | None, ...]  # per sample: what happened where the environment failed
    generation_metadata: Tensor  # int64 [N_decode, 2]: running, waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """What each response is worth."""

    reward_components: Tensor  # float32 [B_prompt*G, N_reward]
    reward: Tensor  # float32 [B_prompt*G]
    token_level_reward: Tensor  # float32 [B_prompt*G, S_resp]
    component_names: tuple[str, ...]
    failed: tuple[str | None, ...]  # per sample: reward_error, reward_timeout, or None
    errors: tuple[str | None, ...]  # per sample: `component: what happened`, also where it counts as 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """Which tokens may enter the loss."""

    loss_mask: Tensor  # int64 [B_prompt*G, S_resp]
    dropped_reason: tuple[str | None, ...]  # per sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """What this rank trains on: the split of its rows, which samples of the step they are, and the rows themselves."""

    batches: Batches
    rows: Rows
    dropped_reason: tuple[str | None, ...]  # per row
    full_sequence: Tensor  # int64 [B_prompt*G / dp, S_prompt + S_resp]
    attention_mask: Tensor  # int64 [B_prompt*G / dp, S_prompt + S_resp]
    position_ids: Tensor  # int64 [B_prompt*G / dp, S_prompt + S_resp]
    response_mask: Tensor  # int64 [B_prompt*G / dp, S_resp]
    loss_mask: Tensor  # int64 [B_prompt*G / dp, S_resp]
    rollout_log_prob: Tensor  # float32 [B_prompt*G / dp, S_resp]
    token_level_reward: Tensor  # float32 [B_prompt*G / dp, S_resp]
    reward_components: Tensor  # float32 [B_prompt*G / dp, N_reward]
    sample_id: Tensor  # int64 [B_prompt*G / dp]
    group_id: Tensor  # int64 [B_prompt*G / dp]


@dataclass(frozen=True, slots=True, kw_only=True)
class OldLogProbs:
    """The policy before the update, on its own samples."""

    old_log_prob: Tensor  # float32 [B_prompt*G, S_resp]
    entropy: Tensor  # float32 [B_prompt*G, S_resp]
    sum_pi_squared: Tensor | None  # float32 [B_prompt*G, S_resp], where the estimator needs it


@dataclass(frozen=True, slots=True, kw_only=True)
class RefLogProbs:
    """The reference policy on the same tokens."""

    ref_log_prob: Tensor  # float32 [B_prompt*G, S_resp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """What a greedy response to each prompt is worth."""

    baseline_reward: Tensor  # float32 [B_prompt]
    no_baseline: tuple[str | None, ...]  # per prompt: why its greedy response has no reward, and None where it has


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What the critic expects before each response token."""

    values: Tensor  # float32 [B_prompt*G, S_resp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """How much better than expected a sample was, and each token of it; what of it may still be trained on."""

    advantage: Tensor  # float32 [B_prompt*G]
    advantages: Tensor  # float32 [B_prompt*G, S_resp]
    returns: Tensor  # float32 [B_prompt*G, S_resp]
    token_level_reward: Tensor | None  # float32 [B_prompt*G, S_resp], with the KL penalty where KL is in the reward
    kl: Tensor | None  # float32 [B_prompt*G, S_resp], where KL is in the reward
    rollout_is_weights: Tensor | None  # float32 [B_prompt*G, S_resp], where rollout is corrected by weights
    loss_mask: Tensor | None  # int64 [B_prompt*G, S_resp], where rollout is corrected by rejection
    dropped_reason: tuple[str | None, ...] | None  # per sample, where rejection took the last token of some
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What the update of the policy came to, one entry per optimizer step."""

    policy_loss: Tensor  # float32 [updates]
    kl_loss: Tensor
    entropy_loss: Tensor
    grad_norm: Tensor
    old_log_prob: Tensor | None  # float32 [B_prompt*G, S_resp], where no pass of its own made it
    first_log_prob: Tensor | None  # float32 [B_prompt*G, S_resp], of the first pass, where none came before the update
    loss_mask: Tensor | None  # int64 [B_prompt*G, S_resp], of the first pass, where the loss itself rejects
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticUpdate:
    """What the update of the critic came to, one entry per optimizer step."""

    value_loss: Tensor  # float32 [updates]
    grad_norm: Tensor
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """The rollout weights after they took over the policy's."""

    policy_version: int
    update_ratio: float | None  # ‖Δ‖ / ‖w‖ over all tensors; None where weights are shared: nothing to compare with
