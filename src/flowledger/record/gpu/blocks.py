"""What a snapshot of torch's allocator holds: every block that is alive, by kind of memory and by the stage that made it.

A block is of the kind of the storage that is known to lie in it. Of the others the Python frames that made it say what it
is (tables/frames.toml), and where they say nothing it is temporary: backward allocates from threads that have no frames. When a block was made stands in the
allocator's history, which is a ring: what was made before its oldest entry has no stage. (Format: `torch.cuda.memory._snapshot`,
torch 2.13; times are microseconds of the wall clock.)
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flowledger.tables.frames import kind_of

_FORWARD = ("torch/nn/modules/module.py", "_call_impl")
_ALIVE = "active_allocated"


class Moment(NamedTuple):
    """From this moment on a process was in a stage; null: in none."""

    wall_us: int
    stage: str | None


class Held(NamedTuple):
    """Blocks of one kind, one stage and one place in the code, together."""

    kind: str
    stage: str | None
    place: str | None  # file:line function, the innermost outside of torch
    bytes: int
    blocks: int


def held(snapshot: Mapping[str, Any], device: int, known: Mapping[int, str], moments: Sequence[Moment]) -> list[Held]:
    """What is alive on a device, the largest first. known: address of a storage → its kind; moments: in order of time."""
    blocks = sorted(_alive(snapshot, device), key=lambda block: int(block["address"]))
    kinds, born = _kinds(blocks, known), _births(snapshot, device)
    times = [moment.wall_us for moment in moments]
    sums: dict[tuple[str, str | None, str | None], tuple[int, int]] = {}
    for block in blocks:
        when, frames = born.get(block["address"]), block.get("frames") or ()
        at = bisect_right(times, when) - 1 if when is not None else -1
        stage = moments[at].stage if at >= 0 else None
        kind = kinds.get(block["address"]) or kind_by_frames(frames, stage)
        key = kind, stage, place_of(frames)
        size, count = sums.get(key, (0, 0))
        sums[key] = size + int(block["size"]), count + 1
    found = [Held(*key, bytes=size, blocks=count) for key, (size, count) in sums.items()]
    return sorted(found, key=lambda one: (-one.bytes, one.kind, one.stage or "", one.place or ""))


def _alive(snapshot: Mapping[str, Any], device: int) -> Iterator[Mapping[str, Any]]:
    for segment in snapshot.get("segments", ()):
        if segment.get("device", device) != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == _ALIVE:
                yield {"address": address} | block
            address += block["size"]  # blocks fill their segment; older versions do not say where each lies


def _kinds(blocks: Sequence[Mapping[str, Any]], known: Mapping[int, str]) -> dict[int, str]:
    """Address of a block → kind of the first storage that lies in it."""
    starts = [int(block["address"]) for block in blocks]
    found: dict[int, str] = {}
    for pointer, kind in known.items():
        at = bisect_right(starts, pointer) - 1
        if at >= 0 and pointer < starts[at] + blocks[at]["size"]:
            found.setdefault(starts[at], kind)
    return found


def _births(snapshot: Mapping[str, Any], device: int) -> dict[int, int]:
    """Address → when it was last given away, as far as the history goes back."""
    traces = snapshot.get("device_traces", ())
    entries = traces[device] if device < len(traces) else ()
    return {entry["addr"]: entry["time_us"] for entry in entries if entry["action"] == "alloc" and "time_us" in entry}


def kind_by_frames(frames: Sequence[Mapping[str, Any]], stage: str | None) -> str:
    """What frames say; of a module that is called where a model is trained, activation; else temporary."""
    found = kind_of(frames)
    if found is not None:
        return found
    forward = any(frame["filename"].endswith(_FORWARD[0]) and frame["name"] == _FORWARD[1] for frame in frames)
    trains = stage is None or stage.startswith("update_")
    return "activation" if forward and trains else "temporary"


def place_of(frames: Sequence[Mapping[str, Any]]) -> str | None:
    """Where it was asked for, in the words of a traceback; torch's own lines only where there are no others."""
    for frame in frames:
        if "/torch/" not in frame["filename"] and frame["filename"] not in ("??", ""):
            return f"{'/'.join(frame['filename'].split('/')[-2:])}:{frame['line']} {frame['name']}"
    return None
