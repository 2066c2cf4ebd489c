"""A second device, played by the CPU: a tensor on it has its numbers in a CPU tensor, and says that it lives elsewhere.

Every operator that meets tensors of both devices raises, but for those that a GPU takes as well: copies that are asked for,
rows picked by indices on the CPU, and CPU scalars in elementwise operators. Torch knows the device's name (`lazy`, which
belongs to a backend that is not used here), and starts no threads of its own for it in backward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

DEVICE = torch.device("lazy", 0)
CROSSES = frozenset({"_to_copy", "_local_scalar_dense"})
INDEXED = frozenset({"index", "index_put", "index_put_", "_unsafe_index_put"})


class Mixed(Exception):  # noqa: N818
    """An operator met tensors of both devices."""


class Elsewhere(Tensor):
    """A tensor of the second device; `held` is where its numbers are."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Elsewhere":
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Elsewhere({self.held!r})"

    def tolist(self) -> Any:
        """As of any tensor; torch refuses it to others than its own kinds."""
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Makes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Tensors are made on the second device where they are asked for there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch would import its compiler to say so

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def there() -> Iterator[torch.device]:
    """Inside, torch has a second device."""
    supported = optimizer._get_fused_kernels_supported_devices
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    optimizer._get_fused_kernels_supported_devices = lambda: [*supported(), DEVICE.type]
    torch.__future__.set_swap_module_params_on_conversion(True)  # else tied weights would part: theirs is another class
    torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]  # torch.tensor moves what it made, and is seen
    setattr(torch, DEVICE.type, ModuleType(DEVICE.type))  # checkpointing asks it for random states
    try:
        with _Makes():  # type: ignore[no-untyped-call]  # torch leaves it untyped
            yield DEVICE
    finally:
        delattr(torch, DEVICE.type)
        torch._C._set_only_lift_cpu_tensors(False)  # type: ignore[attr-defined]  # its stub lacks it
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        optimizer._get_fused_kernels_supported_devices = supported


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = list(_tensors((args, tuple(kwargs.values()))))
    made_there = any(isinstance(x, Elsewhere) for x in given)
    if made_there:
        _check(func.overloadpacket.__name__, torch.Tag.pointwise in func.tags, args, given)
    if kwargs.get("device") is not None:
        made_there = torch.device(kwargs["device"]) == DEVICE
        kwargs = {**kwargs, "device": torch.device("cpu")}
    made = func(*_each(_held, args), **{name: _each(_held, value) for name, value in kwargs.items()})
    if not made_there:
        return made
    made = _each(Elsewhere, made)
    return return_and_correct_aliasing(func, args, kwargs, made) if given else made


def _held(x: Tensor) -> Tensor:
    return x.held if isinstance(x, Elsewhere) else x


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors among an operator's arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _each(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same arguments or results, each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_each(change, one) for one in value) if isinstance(value, list | tuple) else value


def _check(name: str, elementwise: bool, args: Any, given: list[Tensor]) -> None:
    """Raise Mixed where a GPU would not take these tensors together."""
    if name in CROSSES:
        return
    if name in INDEXED:
        if not isinstance(args[0], Elsewhere):
            raise Mixed(f"{name}: a tensor on the CPU meets an index or a value on the second device")
        given = list(_tensors(args[2:]))
    strays = [x for x in given if not isinstance(x, Elsewhere)]
    strays = [x for x in strays if x.dim() or not (elementwise or name in INDEXED)]
    if strays:
        raise Mixed(f"{name} meets {[tuple(x.shape) for x in strays]} on the CPU")
