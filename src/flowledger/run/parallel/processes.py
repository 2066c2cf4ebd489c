"""The processes of a run: whether there are as many as the mesh asks for, and their default group."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from flowledger.config import shards
from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput
from flowledger.run import device
from flowledger.run.exceptions import told
from flowledger.run.parallel import environment

# A collective waits this long for its slowest rank, such as one whose samples are longer in rollout. What has really
# ended is noticed by `watch` within seconds.
TIMEOUT = timedelta(minutes=30)
BACKENDS = "cpu:gloo,cuda:nccl"  # where every process of this machine has a GPU


def world() -> int:
    """Processes that were started together: torchrun's WORLD_SIZE; 1 where it started none. Raises BadInput as `started`."""
    return dist.get_world_size() if dist.is_initialized() else environment.started()


def check(config: RunConfig) -> None:
    """Raise BadInput where the mesh does not fit the processes, the batch or, as far as it is known, the model."""
    shards.check(config, world())


def check_model(config: RunConfig, sizes: Mapping[str, int]) -> None:
    """Raise BadInput where the mesh cannot cut a model of these sizes (by symbol: L, A, K, F, E)."""
    shards.check_sizes(config, sizes)


def start() -> None:
    """Make the default process group from torchrun's environment, unless there is one or nobody to talk to.

    Raises BadInput where the others are not to be met at the address that it names.
    """
    if world() == 1 or dist.is_initialized():
        return
    each_has_one = device.gpus() >= environment.processes_here()
    try:
        dist.init_process_group(BACKENDS if each_has_one else "gloo", timeout=TIMEOUT)
    except (dist.DistError, RuntimeError, ValueError) as error:
        at = f"MASTER_ADDR:MASTER_PORT = {os.environ[environment.ADDRESS]}:{os.environ[environment.PORT]}"
        raise BadInput(f"the {world()} processes do not meet at {at}: {told(error)}") from None


def end() -> None:
    """Leave the default process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def agreed(value: Any) -> Any:
    """What rank 0 says, on all ranks."""
    if world() == 1:
        return value
    said = [value]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def everyone(value: Any) -> list[Any]:
    """What each rank says, in their order."""
    if world() == 1:
        return [value]
    said: list[Any] = [None] * world()
    dist.all_gather_object(said, value)
    return said
