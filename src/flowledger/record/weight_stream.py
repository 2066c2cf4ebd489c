"""Weights on their way from the trainer to the engine that samples: how much passes, and whether the same arrives.

The checksum is over 64 elements of each tensor, evenly spread, with its name and shape, and does not ask for an order: the
sender streams tensors, the receiver gets buckets of them. To look at all elements would cost a copy of the whole model.
Of tensors on a device there is none, unless the recording may wait for it (level `tokens`).
"""

import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

SAMPLED = 64  # elements of each tensor
WHOLE = 1 << 32
_UNKNOWN: set[Any] = set()  # dtypes that numpy does not know

Metric = Callable[[str, float], None]


@dataclass(slots=True)
class Passed:
    """What has passed so far. `waits`: for a device, to look at what lies there."""

    waits: bool = False
    tensors: int = 0
    bytes: int = 0
    checksum: int | None = 0  # None: something has passed that was not looked at

    def take(self, weight: tuple[str, Any]) -> None:
        name, tensor = weight
        self.add(name, tensor)

    def add(self, name: str, tensor: Any) -> None:
        self.tensors += 1
        self.bytes += tensor.numel() * tensor.element_size()
        if not (tensor.is_cpu or self.waits):
            self.checksum = None
        if self.checksum is not None:
            self.checksum = (self.checksum + checksum(name, tensor)) % WHOLE

    def tell(self, metric: Metric, way: str) -> None:
        """As metrics; way: sent or received."""
        for what, number in (("tensors", self.tensors), ("bytes", self.bytes), ("checksum", self.checksum)):
            if number is not None:
                metric(f"weight_sync/{way}_{what}", float(number))


def checksum(name: str, tensor: Any) -> int:
    """crc32 of a tensor's name, shape and up to 64 of its elements."""
    torch, numel, own = sys.modules["torch"], tensor.numel(), tensor.detach()
    step = max(1, numel // SAMPLED)
    if not tensor.dim() or not numel:
        some = own.reshape(-1)
    elif (
        type(own) is torch.Tensor and own.is_contiguous()
    ):  # as nearly all are: one look, where the other way takes five
        some = own.as_strided((min(SAMPLED, -(-numel // step)),), (step,))
    else:  # by its own strides: to make one row of it could copy all of it
        places = torch.arange(0, numel, step, device=tensor.device)[:SAMPLED]
        some = own[torch.unravel_index(places, tensor.shape)]
    return zlib.crc32(f"{name}|{tuple(tensor.shape)}|".encode() + _raw(some, torch.uint8))


def _raw(some: Any, byte: Any) -> bytes:
    """The elements in their order, as they lie in memory."""
    if some.is_cpu and some.dtype not in _UNKNOWN:
        try:
            return bytes(some.numpy().tobytes())
        except TypeError:  # a dtype that numpy does not know
            _UNKNOWN.add(some.dtype)
    return bytes(some.to("cpu").contiguous().view(byte).numpy().tobytes())


def counted(result: Any, guard: Callable[..., Any], metric: Metric, *, waits: bool = False) -> Any:
    """A result whose first part is a stream of names and weights, the same but counted as it passes.

    What can be gone through more than once is counted now, and stays what it is.
    """
    if not (isinstance(result, tuple) and result and isinstance(result[0], Iterable)):
        return result
    stream = passing(result[0], guard, metric, waits=waits)
    if isinstance(result[0], Iterator):
        return stream, *result[1:]
    guard(deque, stream, 0)
    return result


def passing(
    weights: Iterable[tuple[str, Any]], guard: Callable[..., Any], metric: Metric, *, waits: bool = False
) -> Iterator[tuple[str, Any]]:
    """The same names and tensors, counted as they pass; what passed is told at the end, or where it was given up."""
    passed = Passed(waits)
    try:
        for weight in weights:
            guard(passed.take, weight)
            yield weight
    finally:
        passed.tell(metric, "sent")
