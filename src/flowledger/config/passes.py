"""Which forward passes a step of the loop makes, and why: an estimator's needs, and log-probs that need no pass."""

from typing import TYPE_CHECKING

from flowledger.tables.algorithms import algorithms, method, needs_of

if TYPE_CHECKING:
    from flowledger.config.algorithm import Algorithm
    from flowledger.config.schema import MicroBatch, RunConfig

BYPASS = "bypass_mode"  # the policy loss whose old policy is the rollout itself


def needs(config: "RunConfig") -> frozenset[str]:
    """What the chosen estimator and loss need beside rewards: critic, group, baseline, sum_pi_squared, …

    A name that only a foreign framework has needs nothing of these.
    """
    algorithm, known = config.algorithm, algorithms()
    chosen = (("advantage", algorithm.advantage), ("policy_loss", algorithm.policy_loss))
    return frozenset(need for one in chosen if one in known for need in known[one].needs)


def old_log_prob_readers(config: "RunConfig") -> tuple[str, ...]:
    """The settings for which something before the update reads old_log_prob: KL in the reward, a correction, an estimator."""
    algorithm = config.algorithm
    readers = {
        "algorithm.kl_in = 'reward'": config.ref is not None and algorithm.kl_in == "reward",
        "algorithm.rollout_correction": algorithm.rollout_correction.active,
        f"algorithm.advantage = {algorithm.advantage!r}": bool(
            needs_of("advantage", algorithm.advantage) & {"old_log_prob", "sum_pi_squared"}
        ),
    }
    return tuple(reader for reader, reads in readers.items() if reads)


def reads_whole(algorithm: "Algorithm") -> frozenset[str]:
    """The tensors that are read of a whole step, all data-parallel ranks together: by the estimator, and by a correction."""
    corrects = algorithm.rollout_correction.active and algorithm.policy_loss != BYPASS
    correction = ("old_log_prob", "rollout_log_prob") if corrects else ()
    return frozenset(("loss_mask", "group_id", *method("advantage", algorithm.advantage).inputs, *correction))


def updates_per_step(config: "RunConfig") -> int:
    """Optimizer steps of the policy in one step of the run, all epochs together."""
    return -(-config.data.prompts_per_step // config.mini_batch_prompts) * config.actor.epochs


def old_log_prob_pass(config: "RunConfig") -> bool:
    """Whether a step of the loop computes log-probs before its update.

    With one optimizer step a step of the run, the update's own forward gives them: the policy has not moved yet. In
    bypass mode the rollout's stand in for them.
    """
    if config.algorithm.policy_loss == BYPASS:
        return False
    if config.actor.old_log_prob is not None:
        return config.actor.old_log_prob
    return updates_per_step(config) > 1 or bool(old_log_prob_readers(config))


def limits_of(config: "RunConfig", stage: str) -> "MicroBatch | None":
    """What cuts a pass without gradients into micro-batches of its own, whatever mini-batches there are; None: the update's.

    Source: verl, `log_prob_micro_batch_size_per_gpu` and `log_prob_max_token_len_per_gpu` of the rollout and of the reference.
    """
    if stage == "values":
        return (config.critic.values_micro_batch or config.critic.micro_batch) if config.critic else None
    own = config.ref.micro_batch if stage == "ref_log_prob" and config.ref else None
    return own or config.actor.log_prob_micro_batch
