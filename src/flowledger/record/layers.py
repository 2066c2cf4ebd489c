"""Models, optimizers and caches as rows: one a layer, and one (layer null) for what belongs to no layer.

Flattened by type and remembered by object, since the same model is seen at every stage.
"""

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

_MODULES: dict[type, bool] = {}  # class -> whether it is a module
_Key = tuple[int | None, object]  # layer, and what else keeps tensors apart
_NONE = (lambda: True,)  # of a module without parameters
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")


class Part(NamedTuple):
    """The tensors of one layer taken together: of a cache each tensor, of an optimizer each moment by itself."""

    layer: int | None
    shape: tuple[int, ...]  # on this rank
    dtype: object
    bytes: int  # on this rank
    whole: tuple[int, ...] | None = None  # on all ranks, where tensors know it of themselves (DTensor)


class Layers:
    """Which parameter belongs to which layer, for every module seen."""

    def __init__(self) -> None:
        self._layer_of: dict[int, int | None] = {}  # id(parameter) -> layer; parameters live as long as their module
        self._modules: weakref.WeakKeyDictionary[Any, dict[int | None, list[Any]]] = weakref.WeakKeyDictionary()
        self._parts: weakref.WeakKeyDictionary[Any, dict[str, tuple[object, list[Part]]]] = weakref.WeakKeyDictionary()
        self._met: set[str] = set()  # names of what was flattened at least once: of other kinds nobody knows anything

    def modules(self) -> list[Any]:
        """The modules met so far that are still alive."""
        return list(self._modules)

    def parts(self, name: str, value: Any) -> list[Part] | None:
        """One part a layer; None for an object of a kind that cannot be flattened."""
        owner, tensors, sign = self._source(name, value)
        if owner is None:
            return None
        try:
            remembered = self._parts.setdefault(owner, {})
        except TypeError:  # no weak reference to it, no memory of it
            remembered = {}
        if name not in remembered or remembered[name][0] != sign:
            self._met.add(name)
            remembered[name] = (sign, _summed(name, tensors))
        return remembered[name][1]

    def bytes_by_kind(self, device: str | None = None) -> dict[str, int]:
        """Bytes of parameters, gradients, optimizer state and caches that exist now, each where one was ever met; a shared one counts once.

        device: `cuda` leaves out what has been moved elsewhere; each model, optimizer and cache by its first tensor.
        """
        # Two modules that share a first parameter are one model seen twice.
        firsts = {
            id(refs[0]()): module
            for module, known in self._modules.items() for refs in list(known.values())[:1] if _is_on(refs[0](), device)
        }  # fmt: skip
        named = (("params", "param"), ("grads", "grad")) if self._layer_of else ()
        sizes = {
            kind: sum(part.bytes for module in firsts.values() for part in self.parts(name, module) or ())
            for name, kind in named
        }
        for name, kind in (("optimizer_state", "optimizer"), ("kv_cache", "kv_cache")):
            if name not in self._met:
                continue
            owners = [owner for owner, parts in self._parts.items() if name in parts]
            firsts_of = ((owner, next(iter(self._source(name, owner)[1]), None)) for owner in owners)
            owners = [owner for owner, first in firsts_of if _is_on(first[1] if first is not None else None, device)]
            sizes[kind] = sum(part.bytes for owner in owners for part in self.parts(name, owner) or ())
        return sizes

    def optimizer_tensors(self) -> Iterator[Any]:
        """The state of every optimizer met so far, step counters included."""
        for owner in [owner for owner, parts in self._parts.items() if "optimizer_state" in parts]:
            for entry in list(owner.state.values()):
                yield from (value for value in entry.values() if hasattr(type(value), "untyped_storage"))

    def cache_tensors(self) -> Iterator[Any]:
        """Keys and values of every cache met so far that is still there."""
        for owner in [owner for owner, parts in self._parts.items() if "kv_cache" in parts]:
            yield from self.tensors("kv_cache", owner)

    def tensors(self, name: str, value: Any) -> list[Any]:
        """Every tensor behind such an object."""
        return [held(tensor) for _, tensor in self._source(name, value)[1]]

    def meet(self, module: Any) -> dict[int | None, list[Any]]:
        """Weak references to the parameters of a module, by layer."""
        known = self._modules.get(module)
        if known is None or next(iter(known.values()), _NONE)[0]() is None:  # its parameters were made anew
            known = self._modules[module] = {}
            for name, parameter in module.named_parameters():
                found = _LAYER.search(name)
                layer = int(found.group(1)) if found else None
                self._layer_of[id(parameter)] = layer
                known.setdefault(layer, []).append(weakref.ref(parameter))
        return known

    def _source(self, name: str, value: Any) -> tuple[Any, Iterable[tuple[_Key, Any]], object]:
        """(whom to remember it for, its tensors with what they are summed by, what changes when the tensors do)."""
        module = module_in(value)
        if module is not None:
            by_layer = self.meet(module)
            if name != "grads":
                return module, _parameters(by_layer), len(by_layer)
            sign = tuple(refs[0]().grad is None for refs in by_layer.values())
            return module, ((k, p.grad) for k, p in _parameters(by_layer) if p.grad is not None), sign
        state = getattr(value, "state", None)
        if isinstance(state, Mapping):
            return value, self._moments(state), len(state)
        layers = getattr(value, "layers", None)
        if isinstance(layers, (list, tuple)):
            first = [t.shape for layer in layers[:1] for t in _cache_tensors(layer)]
            pairs = (((index, n), t) for index, layer in enumerate(layers) for n, t in enumerate(_cache_tensors(layer)))
            return value, pairs, first
        return None, (), None

    def _moments(self, state: Mapping[Any, Any]) -> Iterator[tuple[_Key, Any]]:
        """The tensors of an optimizer's state, step counters ([]) left out."""
        for parameter, entry in state.items():
            for name, value in entry.items() if isinstance(entry, Mapping) else ():
                if hasattr(type(value), "untyped_storage") and value.dim():
                    yield (self._layer_of.get(id(parameter)), name), value


def module_in(value: Any) -> Any | None:
    """A module, or the module that a small object carries as `model` or `module`; None when there is neither."""
    if _is_module(type(value)):
        return value
    for name in ("model", "module"):
        inside = getattr(value, name, None)
        if _is_module(type(inside)):
            return inside
    return None


def _is_on(tensor: Any, device: str | None) -> bool:
    return device is None or (tensor is not None and tensor.device.type == device)


def _is_module(kind: type) -> bool:
    known = _MODULES.get(kind)
    if known is None:
        known = hasattr(kind, "named_parameters") and hasattr(kind, "register_forward_pre_hook")
        _MODULES[kind] = known
    return known


def _parameters(by_layer: Mapping[int | None, list[Any]]) -> Iterator[tuple[_Key, Any]]:
    for layer, refs in by_layer.items():
        yield from (((layer, None), p) for p in (ref() for ref in refs) if p is not None)


def _cache_tensors(layer: Any) -> list[Any]:
    """Keys and values [B, K, S, D] of one layer of a cache."""
    inside = layer if isinstance(layer, (list, tuple)) else list(getattr(layer, "__dict__", {}).values())
    return [value for value in inside if hasattr(type(value), "untyped_storage") and value.dim() == 4]


def _summed(name: str, tensors: Iterable[tuple[_Key, Any]]) -> list[Part]:
    """One part a key: elements and bytes added up, the dtype of the largest."""
    grouped: dict[_Key, list[Any]] = {}
    for key, tensor in tensors:
        grouped.setdefault(key, []).append(tensor)
    parts = []
    for (layer, _), members in grouped.items():
        largest, mine = max(members, key=lambda tensor: tensor.numel()), [held(tensor) for tensor in members]
        shape = tuple(largest.shape) if name == "kv_cache" else (sum(t.numel() for t in mine),)
        spread = any(local is not tensor for local, tensor in zip(mine, members, strict=True))
        whole = (sum(t.numel() for t in members),) if spread else None
        parts.append(Part(layer, shape, largest.dtype, sum(t.numel() * t.element_size() for t in mine), whole))
    return parts


def held(tensor: Any) -> Any:
    """What this rank holds of a tensor that may be spread over ranks."""
    return tensor.to_local() if hasattr(type(tensor), "to_local") else tensor
