"""Bytes of storages that torch's operators make, from birth to death, on any device and without an allocator."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Tracker(TorchDispatchMode):
    """Bytes of all storages that operators made and that are still alive, and their maximum."""

    def __init__(self, *there: Tensor) -> None:
        """`there`: tensors of before, which do not count."""
        super().__init__()
        self.live = self.peak = 0
        self.sizes: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in there}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.sizes:
                    self.sizes[key] = storage.nbytes()
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._drop, key)
        self.peak = max(self.peak, self.live)
        return out

    def _drop(self, key: int) -> None:
        self.live -= self.sizes.pop(key)
