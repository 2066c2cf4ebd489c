"""The samples of a step cut anew, where a pass or a model has micro-batches or mini-batches of its own."""

from dataclasses import replace

import torch

from flowledger.config.schema import MicroBatch
from flowledger.run import batching
from flowledger.run.batching import Batches
from flowledger.run.parallel.collectives import largest, total
from flowledger.run.parallel.ranks import Ranks
from flowledger.run.parallel.rows import Columns


def recut(
    batches: Batches,
    columns: Columns,
    ranks: Ranks,
    *,
    limits: MicroBatch,
    bytes_per_token: int,
    mini_batch_samples: int | None = None,
) -> Batches:
    """The samples that these batches hold, in mini-batches of so many rows of this rank (None: in one) and micro-batches.

    Data-parallel ranks agree on how many micro-batches there are: each asks the others, and who has fewer cuts finer.
    """
    kept = {sample for part in batches.micro_batches for sample in part}
    lengths: list[int] = columns["attention_mask"].sum(-1).tolist()
    mine = batching.split(
        lengths=lengths,
        kept=[sample in kept for sample in range(len(lengths))],
        mini_batch_samples=mini_batch_samples or len(lengths),
        limits=limits,
        bytes_per_token=bytes_per_token,
    ).mini_batches
    group = ranks.group("dp")
    most = largest(torch.tensor([len(mini.micro_batches) for mini in mine]), group).tolist()
    sequences = total(torch.tensor([mini.sequences for mini in mine]), group).tolist()
    return Batches(
        mini_batches=tuple(
            replace(mini, micro_batches=batching.at_least(number, mini.micro_batches, lengths), sequences=all_of_it)
            for mini, number, all_of_it in zip(mine, most, sequences, strict=True)
        )
    )
