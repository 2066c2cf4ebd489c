"""Who trains on what: the split of a step into mini- and micro-batches, dealt to data-parallel ranks, and its rows sent there."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flowledger.config.schema import RunConfig
from flowledger.run import batching, dropped
from flowledger.run.batches import Balanced
from flowledger.run.parallel import collectives
from flowledger.run.parallel.ranks import Ranks
from flowledger.run.parallel.rows import counts_of, held_rows, moved


def balanced(
    *,
    config: RunConfig,
    bytes_per_token: int,
    ranks: Ranks,
    dropped_reason: Sequence[str | None],
    columns: Mapping[str, Tensor],
) -> Balanced:
    """The split of the step's B samples, and the rows of those that this rank trains on.

    columns: what this rank sampled, by flow name, each [B/ranks, ...]; dropped_reason of the same samples.
    """
    world, group_size = ranks.group("world"), config.rollout.samples_per_prompt
    actors = config.mini_batch_prompts * group_size
    critics = ((config.critic and config.critic.mini_batch_prompts) or config.mini_batch_prompts) * group_size
    here = torch.stack([columns["attention_mask"].sum(-1), columns["loss_mask"].any(-1)], 1).int()  # [B/ranks, 2]
    counts = [count * group_size for count in counts_of(config.data.prompts_per_step, ranks)]
    lengths, kept = collectives.gathered(here, world, counts).unbind(1)
    shares = batching.shares(
        lengths=lengths.tolist(),
        kept=kept.bool().tolist(),
        mini_batch_samples=actors,
        limits=config.actor.micro_batch,
        bytes_per_token=bytes_per_token,
        ranks=ranks.degree("dp"),
        dealt_samples=math.gcd(actors, critics),
    )
    taken = [share.samples for share in shares]
    sent = moved({**columns, "dropped_reason": dropped.codes(dropped_reason)}, taken, group_size, ranks)
    reasons = dropped.decoded(sent.pop("dropped_reason"))
    return Balanced(
        batches=shares[ranks.at("dp")].batches, rows=held_rows(taken, ranks), dropped_reason=reasons, **sent
    )
