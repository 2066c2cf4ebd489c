"""The platform that verl lacks: this machine's processors, as one device.

verl imports this file in each of its processes, by an entry point, and calls nothing: importing it puts it in force.
VERL_PLATFORM=cpu selects it, VERL_ENGINE_DEVICE=cuda the training engine, which is registered for accelerators only.
"""

import os
import time
import types
from contextlib import nullcontext
from typing import Any

import ray._private.services
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

PATIENCE_S = 300
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
# What verl asks of torch.cuda and torch.cpu lacks: name → the answer. No allocator here counts anything.
DEVICE = {
    "current_device": 0,
    "device_count": 1,
    "empty_cache": None,
    "get_device_name": "CPU",
    "get_device_properties": types.SimpleNamespace(name="CPU", total_memory=MEMORY),
    "ipc_collect": None,
    "is_available": True,
    "max_memory_allocated": 0,
    "max_memory_reserved": 0,
    "mem_get_info": (MEMORY // 2, MEMORY),
    "memory_allocated": 0,
    "memory_reserved": 0,
    "reset_peak_memory_stats": None,
    "set_device": None,
    "synchronize": None,
}
# Every method that the base class leaves open: name → the answer.
PLATFORM = {
    "communication_backend_name": "gloo",
    "cudart": None,
    "current_device": torch.device("cpu"),
    "device_count": 1,
    "empty_cache": None,
    "get_device_capability": (None, None),
    "is_available": True,
    "is_ipc_supported": False,
    "nvtx_range": nullcontext(),
    "profiler_start": None,
    "profiler_stop": None,
    "ray_noset_envvars": ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"],
    "ray_resource_name": "GPU",  # a logical one: the launch tells ray how many
    "set_allocator_settings": None,
    "set_device": None,
    "synchronize": None,
    "visible_devices_envvar": "CUDA_VISIBLE_DEVICES",
}


def answering(answers: dict[str, Any]) -> dict[str, Any]:
    """A function for each name, whatever it is called with."""
    return {name: lambda *_, answer=answer, **__: answer for name, answer in answers.items()}


def device_module() -> types.ModuleType:
    """`torch.cpu`, with the rest of what verl calls on the module of a device."""
    module = types.ModuleType("verl_cpu_device")
    vars(module).update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
    vars(module).update(answering(DEVICE))
    vars(module).update(
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
    )
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """One device of the type cpu, with gloo between the processes."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = device_module()
    manual_seed = staticmethod(torch.manual_seed)
    manual_seed_all = staticmethod(torch.manual_seed)
    vars().update(answering(PLATFORM))


def one_backend_a_device() -> None:
    """verl names a backend for the CPU and one for its device; here they are one, and torch refuses to be told twice."""
    original = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *positional: Any, **named: Any) -> None:
        original("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *positional, **named)

    torch.distributed.init_process_group = init_process_group


def no_pinned_memory() -> None:
    """Pinning serves copies to an accelerator and raises without one."""
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.Tensor.is_pinned = lambda self, *_: False


def patience_with_ray() -> None:
    """Ray gives its node 30 seconds to start and offers no setting: too few on a busy machine of two cores."""
    original = ray._private.services.get_node

    def get_node(*asked: Any) -> Any:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            try:
                return original(*asked)
            except RuntimeError:
                time.sleep(1)
        return original(*asked)

    ray._private.services.get_node = get_node


one_backend_a_device()
no_pinned_memory()
patience_with_ray()
