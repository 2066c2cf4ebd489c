"""The optimizer of a model that is trained: AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101)."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flowledger.config.schema import Optim


def adamw(model: nn.Module, settings: Optim, *, lr: float) -> torch.optim.Optimizer:
    """AdamW over what a model trains, with its own learning rate and the run's betas, eps and weight decay.

    Fused: one kernel for all of a tensor's step, on CPU too, and no temporaries as large as the weights.
    """
    return torch.optim.AdamW(
        grouped(p for p in model.parameters() if p.requires_grad),
        lr=lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay, fused=True,
    )  # fmt: skip


def grouped(parameters: Iterable[nn.Parameter]) -> list[dict[str, list[nn.Parameter]]]:
    """Parameter groups whose tensors lie on one mesh, or on none: a fused kernel takes no others together."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return [{"params": members} for members in groups.values()]
