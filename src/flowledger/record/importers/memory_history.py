"""What was alive at a moment of the allocator's past: its history played back from a snapshot, then forward again.

A snapshot says what is alive at its own moment; its history (a ring: the oldest entries are lost) says what was given away
and taken back before. Undoing the history from its end gives what was alive when it began, and following it from there
gives every moment between. An entry names the size that was asked for; what it took is that size rounded up, which is exact
but for blocks that were not split. (torch 2.13, c10/cuda/CUDACachingAllocator.cpp: record_trace, round_size.)
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

ROUNDED = 512  # bytes: kMinBlockSize
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}

Frames = Sequence[Mapping[str, Any]] | None  # None: not known, made before anybody wrote it down


class Event(NamedTuple):
    """One entry of the history. Of `oom` the address is what the device had free, and the size what was asked for."""

    action: str
    address: int
    size: int
    time_us: int
    frames: Frames


class Block(NamedTuple):
    """Memory that is in use: bytes that it takes, and who asked for it."""

    size: int
    frames: Frames


class Moment(NamedTuple):
    """What was in use, and reserved in all, after one entry; `event` -1: before the first."""

    event: int
    alive: dict[int, Block]  # by address
    reserved: int

    @property
    def allocated(self) -> int:
        return sum(block.size for block in self.alive.values())


def peak(events: Sequence[Event], alive: Mapping[int, Block]) -> int:
    """The entry after which most was in use, the first of equals. alive: at the end."""
    sizes = {address: block.size for address, block in alive.items()}
    now = most = sum(sizes.values())
    at = len(events) - 1
    for index in range(len(events) - 1, -1, -1):
        if now >= most:
            most, at = now, index
        event = events[index]
        if event.action == "alloc":
            now -= sizes.pop(event.address, rounded(event.size))
        elif event.action == "free_requested":
            now += rounded(event.size)
    return -1 if now >= most else at


def moments(
    events: Sequence[Event], alive: Mapping[int, Block], reserved: int, wanted: Iterable[int]
) -> dict[int, Moment]:
    """The moments after these entries. alive, reserved: at the end."""
    before, held = _undone(events, alive, reserved)
    left = {address: block.size for address, block in alive.items()}
    asked, found = set(wanted), {}
    last = {
        event.address: index for index, event in enumerate(events) if event.address in left and event.action == "alloc"
    }
    if -1 in asked:
        found[-1] = Moment(-1, dict(before), held)
    for index, event in enumerate(events):
        if event.action == "alloc":
            size = left[event.address] if last.get(event.address) == index else rounded(event.size)
            before[event.address] = Block(size, event.frames)
        elif event.action == "free_requested":
            before.pop(event.address, None)
        else:
            held += _RESERVED.get(event.action, 0) * event.size
        if index in asked:
            found[index] = Moment(index, dict(before), held)
    return found


def rounded(size: int) -> int:
    """What a request takes."""
    return max(-(-size // ROUNDED), 1) * ROUNDED


def _undone(events: Sequence[Event], alive: Mapping[int, Block], reserved: int) -> tuple[dict[int, Block], int]:
    """What was in use and reserved before the first entry."""
    now = dict(alive)
    for event in reversed(events):
        if event.action == "alloc":
            now.pop(event.address, None)
        elif event.action == "free_requested":
            now[event.address] = Block(rounded(event.size), None)
        else:
            reserved -= _RESERVED.get(event.action, 0) * event.size
    return now, reserved
