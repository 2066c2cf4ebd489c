"""Where the tensors of this process live: on its own GPU where every process of the machine has one, else on the CPU.

What is drawn at random is drawn on the CPU and moved, so that the same seed gives the same numbers everywhere. What only
Python reads (lengths, sample ids, reasons, indices of rows) stays on the CPU, and travels between ranks by gloo.
"""

from typing import Literal

import torch
import torch.distributed as dist

from flowledger.flow.errors import BadInput
from flowledger.run.parallel import environment

CPU = torch.device("cpu")
Asked = Literal["auto", "cpu", "cuda"]


def gpus() -> int:
    """GPUs that torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def chosen(asked: Asked) -> torch.device:
    """The device of this process, made torch's current one: `cuda:LOCAL_RANK`, or the CPU.

    `auto` takes GPUs where there are enough, and where the process group, if there is one, can talk between them.
    Raises BadInput for `cuda` where they are not there.
    """
    there, needed = gpus(), environment.processes_here()
    talks = not dist.is_initialized() or "nccl" in dist.get_backend_config()
    if asked == "cuda" and there < needed:
        what = (
            f"torch finds {there} GPUs for the {needed} processes of this machine"
            if there
            else "torch finds no GPU here"
        )
        raise BadInput(f"device = cuda and {what}; use device = {'auto' if there else 'cpu'}")
    if asked == "cpu" or there < needed or not talks:
        return CPU
    device = torch.device("cuda", environment.local_rank())
    torch.cuda.set_device(device)
    return device


def called(device: torch.device) -> str:
    """`cpu`, or the name of a GPU, under which tables have what it can do."""
    return device.type if device.type != "cuda" else torch.cuda.get_device_name(device)
