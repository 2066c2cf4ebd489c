"""The optimizer of a model that is trained: AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101)."""

import torch
from torch import nn

from flowledger.config.schema import Optim


def adamw(model: nn.Module, settings: Optim, *, lr: float) -> torch.optim.Optimizer:
    """AdamW over what a model trains, with its own learning rate and the run's betas, eps and weight decay.

    Fused: one kernel for all of a tensor's step, on CPU too, and no temporaries as large as the weights.
    """
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay, fused=True,
    )  # fmt: skip
