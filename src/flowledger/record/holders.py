"""Who still holds a storage: a walk over the local and global variables of every running frame.

Best effort and bounded: containers and objects to a depth of three, a number of objects, and a time. The walk reads
variables and nothing else; where CPython keeps a copy of the locals it asked for, the copy is emptied again, since it
would keep tensors alive.
"""

import inspect
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

DEPTH = 3
OBJECTS = 4_000  # looked at within the variables of one frame or module
NEAR = 12  # innermost frames that are searched to the full depth before anything else
SECONDS = 0.02
_PLAIN = (str, bytes, int, float, bool, type(None), type, ModuleType)
_OURS = "flowledger.record"


def holders(pointers: Iterable[int]) -> dict[int, str]:
    """`module.function: path` of a variable through which each storage is reached, where one is found in time."""
    search = _Search(set(pointers))
    frames = _frames()
    for within in (frames[:NEAR], frames[NEAR:]):  # a program's outer frames may hold more than there is time for
        spaces = list(_namespaces(within))
        for depth in range(DEPTH + 1):  # what is near is found first, and is the better answer
            for where, names in spaces:
                if search.done:
                    return search.found
                search.begin(where)
                for name, value in names:
                    search.visit(value, name, depth)
    return search.found


def _frames() -> list[FrameType]:
    """The frames of every thread, this thread's first and innermost first, our own left out.

    No variable may be left pointing at the frame it lives in: that would be a cycle, and keep every local alive.
    """
    found: list[FrameType] = []
    own = threading.get_ident()
    threads = sorted(sys._current_frames().items(), key=lambda item: item[0] != own)
    for _, frame in threads:
        walk: FrameType | None = frame
        while walk is not None:
            if not str(walk.f_globals.get("__name__")).startswith(_OURS):
                found.append(walk)
            walk = walk.f_back
    del frame, threads
    return found


def _namespaces(frames: list[FrameType]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Locals of each frame, and each module's globals after its first frame."""
    modules: set[int] = set()
    for frame in frames:
        module = str(frame.f_globals.get("__name__", "?"))
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            yield f"{module}.{frame.f_code.co_qualname}", _locals(frame)
        if id(frame.f_globals) not in modules:
            modules.add(id(frame.f_globals))
            yield module, [(name, value) for name, value in frame.f_globals.items() if not name.startswith("__")]


def _locals(frame: FrameType) -> list[tuple[str, Any]]:
    snapshot = frame.f_locals
    found = list(snapshot.items())
    if isinstance(snapshot, dict):  # up to Python 3.12 the frame keeps this dict, and with it every tensor in it
        snapshot.clear()
    return found


class _Search:
    def __init__(self, wanted: set[int]) -> None:
        self.found: dict[int, str] = {}
        self._wanted = wanted
        self._where = ""
        self._seen: set[int] = set()
        self._until = time.monotonic() + SECONDS

    def begin(self, where: str) -> None:
        """Start on the variables of a frame or module."""
        self._where = where
        self._seen.clear()

    @property
    def done(self) -> bool:
        return not self._wanted or time.monotonic() > self._until

    def visit(self, value: Any, name: str, depth: int) -> None:
        """Look at a value and, `depth` levels deep, at what is inside; `name` is how to write the way to it."""
        if isinstance(value, _PLAIN) or len(self._seen) > OBJECTS or type(value).__module__.startswith(_OURS):
            return
        if hasattr(type(value), "untyped_storage"):
            pointer = _pointer_of(value)
            if pointer in self._wanted:
                self._wanted.discard(pointer)
                self.found[pointer] = f"{self._where}: {name}"
        elif depth and id(value) not in self._seen:
            self._seen.add(id(value))
            for suffix, inner in _members(value):
                self.visit(inner, f"{name}{suffix}", depth - 1)


def _pointer_of(value: Any) -> int:
    try:
        return int(value.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse, nested or fake tensors have none
        return 0


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """What is inside, with the way to write it."""
    if isinstance(value, Mapping):
        yield from ((f"[{_key(key)}]", inner) for key, inner in list(value.items()))
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


def _key(key: Any) -> str:
    return repr(key) if isinstance(key, (str, int)) else type(key).__name__  # the text of a tensor takes milliseconds


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
