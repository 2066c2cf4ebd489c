"""What the host's allocator says, in bytes: glibc's. A reading costs 10 to 400 µs, by the size of the heap."""

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple


class Reading(NamedTuple):
    """One look at an allocator; None where the platform does not say."""

    allocated: int | None = None
    reserved: int | None = None
    device_used: int | None = None
    host_used: int | None = None

    @property
    def fragmentation(self) -> float | None:
        """The part of what is reserved that nothing lives in."""
        return 1 - self.allocated / self.reserved if self.allocated is not None and self.reserved else None


_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


def host_reading() -> Reading:
    """glibc: allocated = in use in arenas + mmapped, reserved = arenas + mmapped; resident set beside it."""
    call = _mallinfo2()
    if call is None:
        return Reading(host_used=resident())
    info = call()
    return Reading(allocated=info.uordblks + info.hblkhd, reserved=info.arena + info.hblkhd, host_used=resident())


@cache
def _mallinfo2() -> Callable[[], Any] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):  # musl, macOS, Windows, glibc before 2.33
        return None
    function.restype, function.argtypes = _Mallinfo2, []
    return function


@lru_cache(maxsize=1)
def _statm(process: int) -> tuple[int, int] | None:
    """(file descriptor, page size) of the memory figures of this process, held open; a forked child opens its own."""
    if not sys.platform.startswith("linux"):
        return None
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC), os.sysconf("SC_PAGE_SIZE")


def resident() -> int | None:
    """Resident set of this process."""
    opened = _statm(os.getpid())
    if opened is None:
        return None
    return int(os.pread(opened[0], 128, 0).split(None, 2)[1]) * opened[1]
