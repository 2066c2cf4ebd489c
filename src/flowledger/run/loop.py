"""The reference loop. `rl_step` is one step of GRPO on one page: prompt, rollout, reward, log-probs, advantage, update, sync."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

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
        source=w.source, tokenizer=w.policy.tokenizer, data=c.data, step=step, samples_per_prompt=group_size
    )
    r = stages.rollout(
        weights=w.weights, settings=c.rollout, stop_ids=w.stop_ids, pad_id=w.pad_id, generator=w.generator,
        abort=w.abort, prompt_ids=p.prompt_ids, attention_mask=p.attention_mask, prompt_length=p.prompt_length,
        sample_id=p.sample_id,
    )  # fmt: skip
    s = stages.reward(
        scorer=w.scorer, tokenizer=w.policy.tokenizer, problems=p.problems, step=step, full_sequence=r.full_sequence,
        attention_mask=r.attention_mask, response_ids=r.response_ids, response_mask=r.response_mask,
        sample_id=p.sample_id,
    )  # fmt: skip
    f = stages.filter(
        response_mask=r.response_mask, finish_reason=r.finish_reason, failed=s.failed, errors=s.errors,
        sample_id=p.sample_id,
    )  # fmt: skip
    batches = stages.balance(
        attention_mask=r.attention_mask, loss_mask=f.loss_mask, sample_id=p.sample_id,
        mini_batch_samples=c.mini_batch_prompts * group_size, actor=c.actor, bytes_per_token=w.bytes_per_token,
    )  # fmt: skip
    sequences = {
        "full_sequence": r.full_sequence, "attention_mask": r.attention_mask, "position_ids": r.position_ids,
        "response_mask": r.response_mask, "sample_id": p.sample_id,
    }  # fmt: skip
    old = stages.old_log_prob(model=w.policy.model, config=c, batches=batches, **sequences)
    ref = stages.ref_log_prob(reference=w.reference, config=c, batches=batches, **sequences) if w.reference else None
    ref_log_prob = ref.ref_log_prob if ref else None
    a = stages.advantage(
        algorithm=c.algorithm, group_size=group_size, token_level_reward=s.token_level_reward, loss_mask=f.loss_mask,
        old_log_prob=old.old_log_prob, ref_log_prob=ref_log_prob, sample_id=p.sample_id, group_id=p.group_id,
    )  # fmt: skip
    u = stages.update_actor(
        model=w.policy.model, optimizer=w.optimizer, config=c, batches=batches, loss_mask=f.loss_mask,
        old_log_prob=old.old_log_prob, ref_log_prob=ref_log_prob, advantages=a.advantages, **sequences,
    )  # fmt: skip
    lr = w.optimizer.param_groups[0]["lr"]
    w.schedule.step()
    synced = stages.weight_sync(model=w.policy.model, weights=w.weights)
    if (folder := checkpoints.folder_of(c)) and checkpoints.due(c, step):
        stages.checkpoint(policy=w.policy, folder=folder, step=step)

    seconds = time.perf_counter() - started
    metrics = measures.measure(
        prompts=p, rollouts=r, rewards=s, filtered=f, old=old, advantages=a, update=u, synced=synced,
        lr=lr, seconds=seconds,
    )  # fmt: skip
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
