"""The worst micro-batch of a stage on one data-parallel rank: tokens, samples, and how many there are."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flowledger.config.agreement import OWN
from flowledger.config.schema import RunConfig
from flowledger.plan.lengths import Lengths
from flowledger.plan.passes import drawn
from flowledger.plan.roles import Work, longest


@dataclass(frozen=True, slots=True)
class Load:
    """One micro-batch at its fullest, and the micro-batches of one optimizer step (or of one no-grad pass)."""

    tokens: int  # before cp and sp cut them
    sequences: int
    micro_batches: int
    beside_tokens: int = 0  # prompt and response of each sample whose prompt is there already (flowledger's own loop)
    last: "Load | None" = None  # the last micro-batch of flowledger's own loop, where fewer samples are left for it


def load(work: Work, config: RunConfig, dp: int, lengths: Lengths | None, values: Mapping[str, Any]) -> Load:
    """What one rank has to hold at once. `values`: the names of plan/facts.

    A static micro-batch is full of samples of the greatest length. A dynamic one is, with length statistics, the fullest
    that drawing them gave; without, it is full. Where a framework closes a micro-batch at the budget, only one sample that
    is longer by itself exceeds it; where the budget fixes but the *number* of micro-batches (verl: `balanced`,
    ceil(all tokens / budget)), equally long samples can exceed it by less than one of them. `sequences` are so many that none is
    longer than the greatest length.

    Where flowledger's own loop packs a prompt once for its samples, a static micro-batch holds as many prompts as samples
    in a row come from (more where a filter leaves groups in pieces), and a dynamic one is planned at its limit all the same.
    Its balancing deals the samples of a group to all dp ranks, and where cp cuts samples each has its prompt to itself.
    A budget counts tokens without padding; where the loop pads, each sample of a micro-batch takes the greatest length.
    """
    found = _load(work, config, dp, lengths, values)
    if config.framework == OWN and work.micro.dynamic and not config.actor.packed:  # [B_micro, S], short samples too
        return replace(found, tokens=found.sequences * longest(config))
    shares = config.actor.packed and config.actor.shared_prompts and config.mesh.cp == 1
    if not (config.framework == OWN and shares):
        return found
    made = _shared(found, work, config, dp)
    return replace(made, last=found.last and _shared(found.last, work, config, dp))


def _shared(found: Load, work: Work, config: RunConfig, dp: int) -> Load:
    """The same with each prompt once for its samples."""
    others = found.sequences - prompts_of(found.sequences, max(1, config.rollout.samples_per_prompt // dp))
    whole = longest(config) if work.micro.dynamic else found.tokens // found.sequences
    saved = 0 if work.micro.dynamic else others * max(0, whole - config.rollout.max_response_tokens)
    return replace(found, tokens=found.tokens - saved, beside_tokens=others * whole)


def prompts_of(samples: int, group: int) -> int:
    """The most prompts that so many samples in a row come from, micro-batches being cut one after another.

    Where one of the two numbers divides the other, cuts fall on borders of groups or within one group.
    """
    if samples % group == 0 or group % samples == 0:
        return -(-samples // group)
    return min(samples, -(-(samples - 1) // group) + 1)


def _load(work: Work, config: RunConfig, dp: int, lengths: Lengths | None, values: Mapping[str, Any]) -> Load:
    """The same where every sample has its prompt to itself."""
    prompt = config.data.max_prompt_tokens
    whole = longest(config) if lengths is None else min(longest(config), lengths.longest(prompt))
    samples = work.mini_batch_samples or config.samples_per_step
    rank_samples = max(1, -(-samples // dp))
    micro = work.micro
    if not micro.dynamic:
        # in TRL the micro-batch makes the mini-batch; elsewhere it cannot hold more samples than that has
        most = micro.samples if "device_batch" in values else rank_samples
        each = min(most or rank_samples, micro.samples or rank_samples)
        left = rank_samples % each if config.framework == OWN else 0
        number = max(1, -(-rank_samples // each))
        last = Load(left * whole, left, number) if left and number > 1 else None
        return Load(each * whole, each, number, last=last)
    budget = micro.max_tokens or micro.max_padded_tokens or longest(config)  # of all ranks that share a sequence
    if lengths is not None:
        found = drawn(rank_samples, budget, {**values, "dp": dp}, lengths)
        sequences = max(round(found.worst_tokens / lengths.mean(prompt)), -(-found.worst_tokens // whole))
        return Load(found.worst_tokens, sequences, max(1, round(found.micro_batches)))
    if config.framework == OWN and micro.samples and micro.samples * whole <= budget:  # that many are there sooner
        count = -(-rank_samples // min(rank_samples, micro.samples))
        each = -(-rank_samples // count) if micro.balance else min(rank_samples, micro.samples)
        return Load(each * whole, each, count)
    full = min(budget, rank_samples * whole)
    if values.get("scheme") != "balanced":
        each = min(rank_samples, max(1, budget // whole))
        return Load(max(whole, full), -(-max(whole, full) // whole), -(-rank_samples // each))
    count = max(1, min(rank_samples, -(-rank_samples * whole // budget)))
    tokens = max(-(-rank_samples // count) * whole, full)
    return Load(tokens, -(-tokens // whole), count)
