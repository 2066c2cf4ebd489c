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
    torch, numel = sys.modules["torch"], tensor.numel()
    places = torch.arange(0, numel, max(1, numel // SAMPLED), device=tensor.device)[:SAMPLED]
    several = tensor.dim() and numel  # by its own strides: to make one row of it could copy all of it
    some = tensor.detach()[torch.unravel_index(places, tensor.shape)] if several else tensor.detach().reshape(-1)
    raw = some.to("cpu").contiguous().view(torch.uint8).numpy().tobytes()
    return zlib.crc32(f"{name}|{tuple(tensor.shape)}|".encode() + raw)


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
