"""Live bytes by kind while a model's own code runs under FakeTensor: every storage, from birth to death.

A dispatch mode sees what operators return, weak references see storages die, and FSDP's way of freeing (resize to 0) is
watched too. What an operator takes and frees within itself is not seen.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowledger.flow.kinds import classify
from flowledger.flow.seams import replaced

ADD = torch.ops.aten.add.Tensor
DEVICE = torch.ops.prim.device.default
PROPAGATION = "torch.distributed.tensor._sharding_prop:ShardingPropagator"


class Known:
    """One storage: its bytes now, and what is known of it."""

    __slots__ = ("bytes", "kind", "signs")

    def __init__(self, size: int) -> None:
        self.bytes, self.signs, self.kind = size, frozenset[str](), "temporary"


class Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Sums by kind at every moment; `peak` is the fullest since `begin`, `at` the phase it fell in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.at = self.phase = ""
        self._most = -1
        self._known: dict[int, Known] = {}
        self._asleep, self._holders = 0, -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(getattr(kind, "__name__", "") == "DTensor" for kind in types):
            return NotImplemented  # it unpacks itself, and its local operators come here again
        if func is DEVICE and hasattr(args[0], "fake_device"):  # asked twice an operator, and only the answer is slow
            return args[0].fake_device
        if func is ADD and self.phase == "backward" and self._alone(*args):
            return torch.ops.aten.add_.Tensor(*args)
        result = func(*args, **(kwargs or {}))
        if not self._asleep:
            collective = "c10d" in func.namespace or func.namespace == "fsdp"
            given = (result, kwargs["out"]) if kwargs and "out" in kwargs else result
            for value in (given,) if isinstance(given, Tensor) else tree_leaves(given):
                if isinstance(value, Tensor):
                    self.see(value, *(("collective",) if collective else ()))
        return result

    def _alone(self, old: Any, new: Any) -> bool:
        """Whether autograd, were no mode on, would add two gradients in place: nobody else holds the first of them."""
        if torch.is_grad_enabled() or not isinstance(new, Tensor) or old.shape != new.shape or old.dtype != new.dtype:
            return False
        count: int = old._use_count()
        if self._holders < 0:
            self._holders = count
        return count <= self._holders and torch._C._storage_Use_Count(old.untyped_storage()._cdata) <= 2

    def see(self, value: Tensor, *signs: str) -> None:
        """Count a tensor's storage, once, and learn what it is."""
        local = getattr(value, "_local_tensor", value)
        storage = local.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Known(0)
            weakref.finalize(storage, self._dead, key)
        self._learn(known, *signs)
        self._resize(known, storage.nbytes())

    def _learn(self, known: Known, *signs: str) -> None:
        if not set(signs) <= known.signs:
            self._count(known, -known.bytes)
            known.signs |= set(signs)
            known.kind = classify(known.signs)
            self._count(known, known.bytes)

    def begin(self) -> None:
        """Forget the peak: what follows is another stage."""
        self._most, self.peak = -1, {}
        self._look()

    def _resize(self, known: Known, size: int) -> None:
        self._count(known, size - known.bytes)
        known.bytes = size
        self._look()

    def _count(self, known: Known, change: int) -> None:
        self.live[known.kind] = self.live.get(known.kind, 0) + change

    def _look(self) -> None:
        total = sum(self.live.values())
        if total > self._most:
            self._most, self.peak, self.at = total, dict(self.live), self.phase

    def _dead(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._count(known, -known.bytes)

    @contextmanager
    def watching(self) -> Iterator["Storages"]:
        """Watch until left."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            known = self._known.get(storage._cdata)
            if known is not None:  # FSDP frees and fills what it gathers by size
                self._learn(known, "collective")
                self._resize(known, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        try:
            with replaced([(f"{PROPAGATION}._propagate_tensor_meta_non_cached", self._unseen)]), self:
                self._learn_holders()
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _learn_holders(self) -> None:
        """How often a gradient counts as held where only autograd holds it: seen on the smallest graph that adds two."""
        leaf = torch.ones(2, requires_grad=True)
        shared = leaf * 2
        self.phase = "backward"
        (shared.sin() + shared.cos()).sum().backward()  # type: ignore[no-untyped-call]
        self.phase = ""

    def _unseen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """DTensor infers shapes by running operators on tensors of global shape, which no rank ever holds."""

        def quietly(*args: Any, **kwargs: Any) -> Any:
            self._asleep += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._asleep -= 1

        return quietly
