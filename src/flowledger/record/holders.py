"""Who still holds a storage: a walk over the local and global variables of every running frame.

Best effort and bounded: containers and objects to a depth of three, a number of objects, and a time. The walk reads
variables and nothing else; where CPython keeps a copy of the locals it asked for, the copy is emptied again, since it
would keep tensors alive.
"""

import inspect
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

DEPTH = 3
OBJECTS = 50_000
SECONDS = 0.05
_PLAIN = (str, bytes, int, float, bool, type(None), type, ModuleType)
_OURS = "flowledger.record"


def holder(pointer: int, *, graph: bool = False) -> str:
    """`module.function: path` of a variable through which the storage at `pointer` is reached.

    Otherwise `autograd graph` for a tensor that had a graph, or `unknown`.
    """
    search = _Search(pointer)
    for where, names in _namespaces():
        for name, value in names:
            path = search.path(value, name, DEPTH)
            if path is not None:
                return f"{where}: {path}"
        if search.spent:
            break
    return "autograd graph" if graph else "unknown"


def _namespaces() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Locals of every frame of every thread, innermost first, then the globals of their modules."""
    modules: dict[int, tuple[str, dict[str, Any]]] = {}
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            module = str(frame.f_globals.get("__name__", "?"))
            if not module.startswith(_OURS):
                modules.setdefault(id(frame.f_globals), (module, frame.f_globals))
                if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                    yield f"{module}.{frame.f_code.co_qualname}", _locals(frame)
            frame = frame.f_back
    for module, names in modules.values():
        yield module, list(names.items())


def _locals(frame: FrameType) -> list[tuple[str, Any]]:
    snapshot = frame.f_locals
    found = list(snapshot.items())
    if isinstance(snapshot, dict):  # up to Python 3.12 the frame keeps this dict, and with it every tensor in it
        snapshot.clear()
    return found


class _Search:
    def __init__(self, pointer: int) -> None:
        self._pointer = pointer
        self._seen: set[tuple[int, int]] = set()
        self._until = time.monotonic() + SECONDS

    @property
    def spent(self) -> bool:
        return len(self._seen) > OBJECTS or time.monotonic() > self._until

    def path(self, value: Any, name: str, depth: int) -> str | None:
        """How to write the way from `name` to the storage, or None."""
        if isinstance(value, _PLAIN) or (id(value), depth) in self._seen or len(self._seen) > OBJECTS:
            return None
        self._seen.add((id(value), depth))
        if hasattr(type(value), "untyped_storage"):
            return name if _pointer_of(value) == self._pointer else None
        if depth:
            for suffix, inner in _members(value):
                found = self.path(inner, f"{name}{suffix}", depth - 1)
                if found is not None:
                    return found
        return None


def _pointer_of(value: Any) -> int | None:
    try:
        return int(value.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse, nested or fake tensors have none
        return None


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """What is inside, with the way to write it."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in list(value.items()))
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        yield from ((f"[{index}]", inner) for index, inner in enumerate(list(value)))
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        yield from ((f"<{name}>", cell.cell_contents) for name, cell in cells if _filled(cell))
    else:
        yield from ((f".{name}", inner) for name, inner in list(getattr(value, "__dict__", {}).items()))
        for name in _slots(type(value)):
            if hasattr(value, name):
                yield f".{name}", getattr(value, name)


def _slots(kind: type) -> Iterator[str]:
    for parent in kind.__mro__:
        listed = parent.__dict__.get("__slots__", ())
        names = (listed,) if isinstance(listed, str) else tuple(listed)
        yield from (name for name in names if not name.startswith("__"))


def _filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
