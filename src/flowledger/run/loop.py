"""The reference loop. `rl_step` is one step on one page: prompt, rollout, reward, log-probs, advantage, update, sync."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from flowledger.config.schema import RunConfig
from flowledger.run import checkpoints, measures, stages
from flowledger.run.world import World, build


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step came to."""

    step: int
    metrics: Mapping[str, float]
    policy_version: int
    seconds: float


def rl_step(*, step: int, world: World) -> StepReport:
    """One sample's way: prompt -> rollout -> reward -> log-probs -> advantage -> loss -> backward -> the next step."""
    started = time.perf_counter()
    c, w = world.config, world
    group_size = c.rollout.samples_per_prompt

    p = stages.prompt(
        source=w.source, tokenizer=w.policy.tokenizer, data=c.data, step=step, samples_per_prompt=group_size,
        ranks=w.ranks,
    )  # fmt: skip
    sampling: dict[str, Any] = {
        "weights": w.weights, "stop_ids": w.stop_ids, "pad_id": w.pad_id, "generator": w.generator, "abort": w.abort,
        "environment": w.environment, "tokenizer": w.policy.tokenizer, "problems": p.problems,
        "prompt_ids": p.prompt_ids, "attention_mask": p.attention_mask, "prompt_length": p.prompt_length,
        "ranks": w.ranks, "prompts_per_step": c.data.prompts_per_step,
    }  # fmt: skip
    r = stages.rollout(settings=c.rollout, sample_id=p.sample_id, **sampling)
    scoring: dict[str, Any] = {
        "scorer": w.scorer,
        "tokenizer": w.policy.tokenizer,
        "problems": p.problems,
        "step": step,
    }
    s = stages.reward(
        full_sequence=r.full_sequence, attention_mask=r.attention_mask, response_ids=r.response_ids,
        response_mask=r.response_mask, sample_id=p.sample_id, **scoring,
    )  # fmt: skip
    baselines = None
    if c.needs("baseline"):
        no_sample = -1 - p.group_id[::group_size]  # greedy responses are none of the step's samples
        greedy = stages.baseline_rollout(settings=c.rollout, sample_id=no_sample, **sampling)
        baselines = stages.baseline_reward(
            greedy=greedy, sample_id=no_sample, prompts_per_step=c.data.prompts_per_step, ranks=w.ranks, **scoring
        )
    f = stages.filter(
        response_mask=r.response_mask, finish_reason=r.finish_reason, environment_errors=r.environment_errors,
        failed=s.failed, errors=s.errors, no_baseline=baselines.no_baseline if baselines else (),
        sample_id=p.sample_id, ranks=w.ranks,
    )  # fmt: skip
    b = stages.balance(
        config=c, bytes_per_token=w.bytes_per_token, ranks=w.ranks, dropped_reason=f.dropped_reason,
        full_sequence=r.full_sequence, attention_mask=r.attention_mask, position_ids=r.position_ids,
        response_mask=r.response_mask, loss_mask=f.loss_mask, rollout_log_prob=r.rollout_log_prob,
        token_level_reward=s.token_level_reward, reward_components=s.reward_components, sample_id=p.sample_id,
        group_id=p.group_id,
    )  # fmt: skip
    passes: dict[str, Any] = {
        "config": c, "ranks": w.ranks, "batches": b.batches, "full_sequence": b.full_sequence,
        "attention_mask": b.attention_mask, "position_ids": b.position_ids, "response_mask": b.response_mask,
        "sample_id": b.sample_id,
    }  # fmt: skip
    old = stages.old_log_prob(model=w.policy.model, **passes) if c.old_log_prob_pass else None
    old_log_prob = old.old_log_prob if old else b.rollout_log_prob if c.bypasses else None
    ref_log_prob = stages.ref_log_prob(reference=w.reference, **passes).ref_log_prob if w.reference else None
    values = stages.values(critic=w.critic, **passes).values if w.critic else None
    a = stages.advantage(
        config=c, kl_coef=w.kl.coef, rows=b.rows, token_level_reward=b.token_level_reward,
        reward_components=b.reward_components, loss_mask=b.loss_mask, dropped_reason=b.dropped_reason,
        rollout_log_prob=b.rollout_log_prob, old_log_prob=old_log_prob, ref_log_prob=ref_log_prob, values=values,
        sum_pi_squared=old.sum_pi_squared if old else None,
        baseline_reward=baselines.baseline_reward if baselines else None, sample_id=b.sample_id, group_id=b.group_id,
    )  # fmt: skip
    loss_mask = b.loss_mask if a.loss_mask is None else a.loss_mask
    v = u = None
    if w.critic and values is not None:
        v = stages.update_critic(critic=w.critic, loss_mask=loss_mask, values=values, returns=a.returns, **passes)
    if step >= c.policy_starts:
        u = stages.update_actor(
            model=w.policy.model, optimizer=w.optimizer, kl_coef=w.kl.coef, rows=b.rows, loss_mask=loss_mask,
            old_log_prob=old_log_prob, ref_log_prob=ref_log_prob, advantages=a.advantages,
            rollout_is_weights=a.rollout_is_weights, **passes,
        )  # fmt: skip
    lr, kl_coef = w.optimizer.param_groups[0]["lr"], w.kl.coef
    w.advance(a, u)
    synced = stages.weight_sync(model=w.policy.model, weights=w.weights, ranks=w.ranks)
    if (folder := checkpoints.folder_of(c)) and checkpoints.due(c, step):
        stages.checkpoint(policy=w.policy, weights=w.weights, folder=folder, step=step, ranks=w.ranks)

    seconds = time.perf_counter() - started
    made = measures.Made(
        prompts=p, rollouts=r, rewards=s, filtered=f, balanced=b, old=old, values=values, advantages=a, critic=v, update=u,
    )  # fmt: skip
    metrics = measures.measure(made, ranks=w.ranks, synced=synced, lr=lr, kl_coef=kl_coef, seconds=seconds)
    return StepReport(step=step, metrics=metrics, policy_version=synced.policy_version, seconds=seconds)


def train(world: World) -> Iterator[StepReport]:
    """All steps of a run, one report at a time; the caller owns what happens between them."""
    for step in range(world.config.steps):
        yield rl_step(step=step, world=world)


@contextmanager
def prepared(config: RunConfig) -> Iterator[World]:
    """Everything a run needs, built from its configuration; the reward process ends with it."""
    if config.threads:
        torch.set_num_threads(config.threads)
    world = build(config)
    try:
        yield world
    finally:
        world.scorer.close()
