"""Whom to blame where a loss is not finite: its inputs in the order in which they are made."""

from collections.abc import Mapping

import torch
from torch import Tensor


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
