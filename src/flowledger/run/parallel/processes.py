"""The processes of a run: whether there are as many as the mesh asks for, and their default group."""

import os

import torch
import torch.distributed as dist

from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput, nearest_divisor


def world() -> int:
    """Processes that were started together: torchrun's WORLD_SIZE; 1 where it started none."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def check(config: RunConfig) -> None:
    """Raise BadInput where the mesh does not fit the processes, the batch or the model."""
    mesh, size = config.mesh, world()
    if mesh.dp * mesh.model != size:
        degrees = "*".join(f"{axis} {getattr(mesh, axis)}" for axis in ("dp", "tp", "pp", "cp", "sp"))
        raise BadInput(
            f"mesh {degrees} = {mesh.dp * mesh.model} ranks ({config.source_of('mesh')}), and there "
            f"{'is 1 process' if size == 1 else f'are {size} processes'}; use --nproc {mesh.dp * mesh.model}"
        )
    if mesh.dp % mesh.ep:
        raise BadInput(
            f"mesh.ep = {mesh.ep} does not divide mesh.dp = {mesh.dp}; use {nearest_divisor(mesh.ep, of=mesh.dp)}"
        )
    if config.mini_batch_samples % mesh.dp:
        raise BadInput(
            f"mini-batches of {config.mini_batch_samples} samples are not divisible by mesh.dp = {mesh.dp}; "
            f"use mesh.dp = {nearest_divisor(mesh.dp, of=config.mini_batch_samples)}"
        )


def start() -> None:
    """Make the default process group from torchrun's environment: nccl where every process has a GPU, else gloo."""
    if world() == 1 or dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")
