"""The kind of each block of a snapshot, and the stage that made it: by frames, and where these are silent by size."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flowledger.record.gpu.blocks import Held, kind_by_frames, place_of
from flowledger.record.importers.memory_history import Event, Frames, Moment
from flowledger.record.importers.notes import Notes
from flowledger.tables.frames import stage_of

MOST_FRAMES = 512  # of one stack that are looked at
UNKNOWN = "residue"  # made before anybody wrote down by whom


class Origin(NamedTuple):
    """What the frames of a block say."""

    kind: str
    stage: str | None
    place: str | None


class Kinds:
    """The origins of one device's blocks. Stacks repeat, so each is looked at once."""

    def __init__(self, events: Sequence[Event], notes: Notes) -> None:
        self._notes = notes
        self._known: dict[int, Origin] = {}  # by the id of a list of frames, which lives as long as the snapshot
        self._history = any(event.action == "alloc" and event.frames for event in events)

    def stage(self, frames: Frames) -> str | None:
        """The stage that these frames are in."""
        return self._origin(frames).stage

    def place(self, frames: Frames) -> str | None:
        """Where in the code they are: file:line function, the innermost outside of torch."""
        return self._origin(frames).place

    def held(self, moment: Moment) -> list[Held]:
        """What is in use, those of one kind, stage and place together, the largest first."""
        sums: dict[Origin, tuple[int, int]] = {}
        silent: Counter[int] = Counter()  # sizes of blocks that threads without frames made
        params: Counter[int] = Counter()
        for block in moment.alive.values():
            origin = self._origin(block.frames)
            if origin == _SILENT:
                silent[block.size] += 1
                continue
            if origin.kind == "param":
                params[block.size] += 1
            size, count = sums.get(origin, (0, 0))
            sums[origin] = size + block.size, count + 1
        for origin, (size, count) in self._by_size(silent, params):
            sums[origin] = size, count
        found = [Held(*origin, bytes=size, blocks=count) for origin, (size, count) in sums.items()]
        return sorted(found, key=lambda one: (-one.bytes, one.kind, one.stage or "", one.place or ""))

    def _by_size(self, silent: Counter[int], params: Counter[int]) -> list[tuple[Origin, tuple[int, int]]]:
        """Blocks without frames: a gradient each for parameters of their size, temporary what is left."""
        grads = silent & params
        rest = silent - grads
        if grads:
            self._notes.remark(
                "grad is by size alone: blocks as large as a parameter that a thread without Python frames made, as backward's are"
            )
        counted = ((Origin("grad", None, None), grads), (_SILENT, rest))
        return [
            (origin, (sum(size * n for size, n in sizes.items()), sizes.total()))
            for origin, sizes in counted if sizes
        ]  # fmt: skip

    def _origin(self, frames: Frames) -> Origin:
        if not isinstance(frames, list):
            return _UNKNOWN
        if not frames:
            return _SILENT if self._history else _UNKNOWN
        known = self._known.get(id(frames))
        if known is None:
            clean = [_frame(one) for one in frames[:MOST_FRAMES] if isinstance(one, dict)]
            stage = stage_of(clean)
            python = [one for one in clean if str(one["filename"]).endswith(".py")]
            known = Origin(kind_by_frames(clean, stage), stage, place_of(python))
            if not python and known.kind == _SILENT.kind:  # frames of C++ that say nothing
                known = _SILENT
            self._known[id(frames)] = known
        return known


_SILENT = Origin("temporary", None, None)
_UNKNOWN = Origin(UNKNOWN, None, None)


def _frame(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "filename": str(raw.get("filename", ""))[:1000],
        "name": str(raw.get("name", ""))[:1000],
        "line": raw.get("line", 0),
    }
