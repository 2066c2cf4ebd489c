"""Hooks on models: tokens that enter a forward pass, hidden states after each layer, and what is saved for backward.

None of them changes a tensor or keeps one: hooks return nothing, and what is packed for backward is what is unpacked.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle


class Saved(NamedTuple):
    """What one layer saved for backward: distinct storages, parameters left out."""

    layer: int | None
    dtype: torch.dtype
    bytes: int


class ModelHooks:
    """The hooks of one recorder. `guard` runs a function and turns what it raises into a row."""

    def __init__(self, guard: Callable[..., Any]) -> None:
        self.tokens = 0  # tokens that entered the embedding of any model, so far
        self._guard = guard
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._met: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self._layer: int | None = None
        self._kept: dict[int | None, dict[int, tuple[int, torch.dtype]]] | None = None

    def meet(self, module: nn.Module) -> None:
        """Count the tokens of a model from now on."""
        if module in self._known:
            return
        self._known.add(module)
        entrance = _entrance(module)
        if id(entrance) not in self._met:
            self._met.add(id(entrance))
            self._handles.append(entrance.register_forward_pre_hook(self._count, with_kwargs=True))

    def knows(self, module: nn.Module) -> bool:
        return module in self._known

    @contextmanager
    def saving(self, saved: Callable[[Tensor], None]) -> Iterator[None]:
        """Show every tensor that is saved for backward to `saved`, and to `forward` while it is open."""

        def pack(tensor: Tensor) -> Tensor:
            if self._kept is not None or not isinstance(tensor, nn.Parameter):  # of those it is known what they are
                self._guard(self._pack, tensor, saved)
            return tensor

        with saved_tensors_hooks(pack, _same):
            yield

    @contextmanager
    def forward(self, module: nn.Module, output: Callable[[int, Tensor], None]) -> Iterator[list[Saved]]:
        """Show the output of each layer within one forward pass; what they saved stands in the list afterwards."""
        summary: list[Saved] = []
        parameters = {p.untyped_storage()._cdata for p in module.parameters()}
        handles: list[RemovableHandle] = []
        self._kept = {}
        try:
            for index, layer in enumerate(_layers(module)):
                handles += self._on_layer(index, layer, output)
            yield summary
        finally:
            for handle in handles:
                handle.remove()
            kept, self._kept, self._layer = self._kept or {}, None, None
            for number, storages in kept.items():
                sizes = [entry for pointer, entry in storages.items() if pointer not in parameters]
                if sizes:
                    summary.append(
                        Saved(number, max(sizes, key=lambda entry: entry[0])[1], sum(size for size, _ in sizes))
                    )

    def close(self) -> None:
        """Take all hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._met.clear()
        self._known.clear()

    def _on_layer(self, index: int, layer: nn.Module, output: Callable[[int, Tensor], None]) -> list[RemovableHandle]:
        def before(_module: nn.Module, _args: Any) -> None:
            self._layer = index

        def after(_module: nn.Module, _args: Any, result: Any) -> None:
            self._layer = None
            first = result[0] if isinstance(result, tuple) else result
            if isinstance(first, Tensor):
                self._guard(output, index, first)

        return [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]

    def _pack(self, tensor: Tensor, saved: Callable[[Tensor], None]) -> None:
        saved(tensor)
        if self._kept is not None:
            storage = tensor.untyped_storage()
            self._kept.setdefault(self._layer, {}).setdefault(storage._cdata, (storage.nbytes(), tensor.dtype))

    def _count(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs.get("input", kwargs.get("input_ids"))
        if isinstance(ids, Tensor):
            self.tokens += ids.numel()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _entrance(module: nn.Module) -> nn.Module:
    """Where token ids enter: the input embedding, which is also passed when the output head is not used."""
    ask = getattr(module, "get_input_embeddings", None)
    try:
        found = ask() if ask is not None else None
    except (NotImplementedError, AttributeError):
        found = None
    if isinstance(found, nn.Module):
        return found
    return next((inner for inner in module.modules() if isinstance(inner, nn.Embedding)), module)


def _layers(module: nn.Module) -> list[nn.Module]:
    """The decoder layers: the longest list of modules that all have the same type."""
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len({type(x) for x in m}) == 1]
    return max(([*found] for found in lists), key=len, default=[])
