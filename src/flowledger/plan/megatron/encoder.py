"""T5 on one pipeline stage: the encoder's layers, and the cross-attention of every decoder layer."""

from dataclasses import replace

from flowledger.plan.megatron.layers import saved
from flowledger.plan.megatron.rank import Rank, rank_of
from flowledger.plan.saved import kept, total
from flowledger.plan.timeline import Live

END = 10**9


def encoder(rank: Rank) -> Rank:
    """The same rank with the encoder's tokens."""
    length = rank.flags.encoder_tokens
    job = replace(rank.job, tokens=rank.job.sequences * length, longest=length)
    return rank_of(job, replace(rank.flags, encoder_layers=0))


def encoder_lives(rank: Rank) -> list[Live]:
    """What encoder and cross-attention keep of the micro-batch at work, from its forward to its backward."""
    other = encoder(rank)
    layer = total(saved(other, 0))
    norm = total(kept("te", "norm", other.symbols, other.words))
    arch = rank.job.architecture
    scores = rank.value("A") * rank.job.sequences * rank.job.longest * rank.flags.encoder_tokens
    symbols = {**rank.symbols, "M": other.value("T"), "S3": scores}
    cross = total(one for module in ("norm", "cross", "projection") for one in kept("te", module, symbols, rank.words))
    return [
        _live("encoder layer", layer, rank.flags.encoder_layers),
        _live("encoder's final norm", norm, 1),
        _live("cross-attention of a decoder layer", cross, arch.layers),
    ]


def _live(label: str, bytes_: int, count: int) -> Live:
    return Live(
        name="activations", kind="activation", bytes=bytes_, count=count, born=0, dies=END, label=label,
        source="megatron/core/models/T5/t5_model.py",
    )  # fmt: skip
