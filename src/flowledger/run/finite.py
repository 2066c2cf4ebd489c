"""Whom to blame where training meets a number that is not finite: what was made first comes first.

A rank looks at what it holds of a tensor. Where all of them are at the same point they tell each other what they found.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flowledger.flow.errors import BadInput
from flowledger.run.parallel import collectives
from flowledger.run.parallel.ranks import ALONE, Ranks
from flowledger.run.parallel.sharded import local

SHOWN = 3  # parameters of a layer that a message names


class NotFinite(BadInput):
    """A loss, a gradient or a norm of one mini-batch is not finite."""


@contextmanager
def traced(*, who: str, rate: str, model: nn.Module, sample_id: Tensor) -> Iterator[None]:
    """Around one mini-batch: what is not finite in it is raised again with its place, its origin and a remedy.

    who: `policy` or `critic`; rate: the key of its learning rate; sample_id [B_mini]. Weights that are not finite are
    named first, since all that follows comes from them.
    """
    try:
        yield
    except NotFinite as error:
        samples = f"samples {int(sample_id.min())} to {int(sample_id.max())}"
        weights = _weights_not_finite(model)
        origin = f"{weights} (then {error})" if weights else str(error)
        raise BadInput(f"{who}, mini-batch of {samples}: {origin}; lower {rate} or check the rewards") from None


def check_norm(model: nn.Module, norm: Tensor, ranks: Ranks = ALONE) -> None:
    """Raise NotFinite where the norm [] of the model's gradients is not finite, naming the layer that met it first.

    The norm is that of all ranks, so all of them raise, and say the same.
    """
    if math.isfinite(float(norm)):
        return
    raise NotFinite(_gradients_not_finite(model, ranks) or _overflow(model, norm, ranks))


def first_not_finite(inputs: Mapping[str, Tensor | None], mask: Tensor, sample_id: Tensor) -> str | None:
    """`name of sample 3, response token 5 is nan` of the first input that is not finite on an unmasked token.

    inputs and mask [B_micro, S_resp], sample_id [B_micro]. None where all of them are finite.
    """
    for name, tensor in inputs.items():
        if tensor is None:
            continue
        bad = ~torch.isfinite(tensor) & mask.bool()
        if bad.any():
            row, token = bad.nonzero()[0].tolist()
            value = float(tensor[row, token].detach())
            return f"{name} of sample {int(sample_id[row])}, response token {token} is {value}"
    return None


def _weights_not_finite(model: nn.Module) -> str | None:
    bad = [name for name, weight in model.named_parameters() if not _finite(weight)]
    if not bad:
        return None
    return f"the weights are not finite since an earlier optimizer step; {len(bad)} are not, the first is {bad[0]}"


def _gradients_not_finite(model: nn.Module, ranks: Ranks) -> str | None:
    """The layer that backward, which goes from the last to the first, met first.

    Within a layer the order is not known, so all of its parameters are candidates. A tied embedding counts as the input.
    """
    mine = [name for name, weight in model.named_parameters() if weight.grad is not None and not _finite(weight.grad)]
    largest = max(_largest(weight.detach()) for weight in model.parameters())
    said = collectives.told((mine, largest), ranks.group("world"))  # by pipeline stage, as ranks are numbered
    bad = list(dict.fromkeys(name for names, _ in said for name in names))
    if not bad:
        return None
    layer = _layer(bad[-1])
    names = [name.removeprefix(f"{layer}.") for name in bad if _layer(name) == layer]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (
        f"gradients of {len(bad)} parameters are not finite; backward met it first in {layer} "
        f"({', '.join(names[:SHOWN])}{more}); the largest weight is {max(largest for _, largest in said):.3g}"
    )


def _overflow(model: nn.Module, norm: Tensor, ranks: Ranks) -> str:
    mine = max((_largest(weight.grad), name) for name, weight in model.named_parameters() if weight.grad is not None)
    largest, name = max(collectives.told(mine, ranks.group("world")))
    kind = str(norm.dtype).removeprefix("torch.")
    return f"every gradient is finite, but their norm overflows {kind}; the largest is {largest:.3g} in {name}"


def _layer(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up_proj.weight`; the module where it is in no numbered layer."""
    numbered = re.match(r".*?\.\d+(?=\.)", name)
    return numbered.group() if numbered else name.rpartition(".")[0] or name


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(local(tensor)).all())


def _largest(tensor: Tensor) -> float:
    """The largest magnitude in what this rank holds of a tensor; 0 where that is nothing."""
    mine = local(tensor).detach()
    return float(mine.abs().max()) if mine.numel() else 0.0
