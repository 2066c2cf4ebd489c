"""What the loop's estimator, loss, KL and rollout correction ask of other settings. Rules as in agreement.py."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from flowledger.config import passes
from flowledger.flow.errors import nearest, nearest_divisor
from flowledger.tables.algorithms import algorithms, meant, names, needs_of

if TYPE_CHECKING:
    from flowledger.config.schema import RunConfig

BY_COMPONENT = "gdpo"  # normalises each component of the reward by itself
PAIRS = "grpo_passk"  # the best sample of a group against the second best: one alone defines nothing
START = "`critic: {path: start}`"


def names_are_known(config: "RunConfig") -> None:
    for key, what in (("advantage", "advantage"), ("policy_loss", "policy_loss"), ("kl_form", "kl_form")):
        value, known = getattr(config.algorithm, key), names(what)
        if value is None:
            continue
        aliases = [alias for row in algorithms().values() if row.what == what for alias in row.aliases]
        if value in known or (what == "kl_form" and value in aliases):
            continue
        use = meant(f"algorithm.{key}", value)
        way = f"; use {use}" if use else nearest(value, known)
        raise ValueError(f"algorithm.{key} = {value!r} is not one of {', '.join(known)}{way}")


def critic_is_there_where_needed(config: "RunConfig") -> None:
    estimator, needed = config.algorithm.advantage, config.needs("critic")
    if needed and config.critic is None:
        raise ValueError(f"algorithm.advantage = {estimator!r} needs a critic, and there is none; add {START}")
    if config.critic is None:
        return
    if not needed:
        users = ", ".join(name for name in names("advantage") if "critic" in needs_of("advantage", name))
        raise ValueError(
            f"critic: algorithm.advantage = {estimator!r} uses no critic; remove it, or set algorithm.advantage = {users}"
        )
    prompts, mini = config.data.prompts_per_step, config.critic.mini_batch_prompts
    if mini and prompts % mini:
        raise ValueError(
            f"critic.mini_batch_prompts = {mini} does not divide data.prompts_per_step = {prompts}; "
            f"use {nearest_divisor(mini, of=prompts)}"
        )


def group_has_a_pair(config: "RunConfig") -> None:
    if config.algorithm.advantage == PAIRS and config.rollout.samples_per_prompt < 2:
        raise ValueError(
            f"rollout.samples_per_prompt = {config.rollout.samples_per_prompt}: algorithm.advantage = {PAIRS!r} compares "
            "the best sample of a group with the second best; use 2 or more"
        )


def old_log_probs_come_from_where_they_can(config: "RunConfig") -> None:
    asked, estimator = config.actor.old_log_prob, config.algorithm.advantage
    if config.bypasses:
        if asked:
            raise ValueError(
                f"actor.old_log_prob = true: algorithm.policy_loss = {passes.BYPASS!r} takes the rollout's log-probs for "
                "old ones; leave it out, or set algorithm.policy_loss = vanilla"
            )
        if config.needs("sum_pi_squared"):
            raise ValueError(
                f"algorithm.advantage = {estimator!r} needs the pass for old log-probs, and algorithm.policy_loss = "
                f"{passes.BYPASS!r} makes none; set algorithm.policy_loss = vanilla"
            )
    elif asked is False:
        readers, steps = passes.old_log_prob_readers(config), passes.updates_per_step(config)
        if readers:
            raise ValueError(
                f"actor.old_log_prob = false: {', '.join(readers)} reads old log-probs before the update; leave it out"
            )
        if steps > 1:
            raise ValueError(
                f"actor.old_log_prob = false: a step has {steps} optimizer steps, and the policy has moved before the "
                "second; leave it out, or set actor.mini_batch_prompts = null and actor.epochs = 1"
            )


def rollout_log_probs_are_there(config: "RunConfig") -> None:
    if config.rollout.log_probs:
        return
    users = []
    if config.needs("rollout_log_prob"):
        users.append(f"algorithm.policy_loss = {config.algorithm.policy_loss!r}")
    if config.algorithm.rollout_correction.active:
        users.append("algorithm.rollout_correction")
    if users:
        raise ValueError(
            f"rollout.log_probs = false: {' and '.join(users)} needs the rollout's log-probs; set it to true"
        )


def kl_can_adapt(config: "RunConfig") -> None:
    algorithm = config.algorithm
    if algorithm.kl_control == "adaptive" and algorithm.kl_coef == 0:
        raise ValueError(
            "algorithm.kl_control = 'adaptive' scales algorithm.kl_coef = 0.0, which stays 0; use 0.001, with "
            "`ref: {path: start}`, or set algorithm.kl_control = fixed"
        )


def kl_reaches_the_advantage(config: "RunConfig") -> None:
    algorithm = config.algorithm
    if algorithm.advantage == BY_COMPONENT and algorithm.kl_in == "reward" and config.ref is not None:
        raise ValueError(
            f"algorithm.kl_in = 'reward': algorithm.advantage = {BY_COMPONENT!r} reads the reward's components, where the KL "
            "does not enter; set algorithm.kl_in = loss"
        )


def covariance_bounds_are_in_order(config: "RunConfig") -> None:
    low, high = config.algorithm.clip_cov_low, config.algorithm.clip_cov_high
    if low >= high:
        raise ValueError(
            f"algorithm.clip_cov_low = {low} is not below algorithm.clip_cov_high = {high}; use {high - 1}"
        )


def turns_have_an_environment(config: "RunConfig") -> None:
    turns, environment = config.rollout.max_turns, config.rollout.environment
    if turns > 1 and environment is None:
        raise ValueError(
            f"rollout.max_turns = {turns}: nobody answers a turn without rollout.environment; name a function, or use 1"
        )
    if turns == 1 and environment is not None:
        raise ValueError(
            f"rollout.environment = {environment!r} is never asked with rollout.max_turns = 1; use 2 or more"
        )


RULES: tuple[Callable[["RunConfig"], None], ...] = (
    names_are_known, critic_is_there_where_needed, group_has_a_pair, old_log_probs_come_from_where_they_can,
    rollout_log_probs_are_there, kl_can_adapt, kl_reaches_the_advantage, covariance_bounds_are_in_order,
    turns_have_an_environment,
)  # fmt: skip
