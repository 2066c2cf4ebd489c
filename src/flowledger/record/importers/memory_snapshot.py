"""Snapshots of torch's allocator, `torch.cuda.memory._dump_snapshot`: what filled a GPU at its peak, and where it ran out.

Of each device: the moment of the snapshot, the peak of the history that it holds, and every shortage in it, by kind of
memory; and who made what was alive at the fullest of these, by stage. A block's kind and stage come from the frames that
asked for it. What was made before anybody wrote frames down is residue. Frameless blocks of the size of a parameter are
taken for its gradient, and a remark says so. Format: `torch.cuda.memory._snapshot`; before torch 2.0 frames stood in `history`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flowledger.flow.errors import BadInput
from flowledger.ledger.rows import MemoryRow, MetricRow, Row
from flowledger.record.gpu.shortage import Said, Shortage, finding
from flowledger.record.importers.block_kinds import Kinds
from flowledger.record.importers.file_ranks import rank_in, step_in
from flowledger.record.importers.memory_history import Block, Event, Moment, moments, peak
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.restricted_pickle import Torn, load
from flowledger.record.importers.source import Source

PROTOCOLS = tuple(bytes((0x80, number)) for number in range(2, 6))  # how a pickle begins
KEYS = (b"segments", b"device_traces")
SHORTAGES = 3  # that are told of in full, the last ones
SIZES = 1 << 60  # a larger number is none of a device
MOST_DEVICES = 1024
T = TypeVar("T")


@dataclass(slots=True)
class Device:
    """One GPU as a snapshot has it. Sizes in bytes."""

    alive: dict[int, Block] = field(default_factory=dict)  # by address
    reserved: int = 0
    inactive_split: int = 0  # free, in segments that are in use elsewhere
    largest_free: int = 0
    events: list[Event] = field(default_factory=list)

    @property
    def told(self) -> bool:
        return bool(self.alive or self.reserved or self.events)


def fits(source: Source) -> bool:
    """A pickle that names what a snapshot has, or is called one."""
    head, called = source.head, source.name.endswith((".pickle", ".pkl"))
    return called or (head.startswith(PROTOCOLS) and any(key in head for key in KEYS))


def read(source: Source, notes: Notes) -> Iterator[Row]:
    """The rows of one file. Raises BadInput where it is no snapshot, or asks to run anything."""
    try:
        found = load(source.chunks(notes), str(source.path), made=event)
    except Torn as torn:
        found = _rest(torn.stack)
        notes.skip(f"the snapshot {torn}: of its history nothing is told", source.path.name)
        if not found:
            raise BadInput(f"{source.path} {torn}, and holds no whole snapshot before that") from None
    devices = {index: device for index, device in enumerate(_devices(found, source)) if device.told}
    if not devices:
        raise BadInput(
            f"{source.path} is a snapshot in which nothing was allocated; was the device used, and the history on?"
        )
    rank, step = rank_in(source.path), step_in(source.path)
    for index, device in devices.items():
        yield from _rows(device, index if rank is None or len(devices) > 1 else rank, step, notes)


def event(entry: dict[Any, Any]) -> Any:
    """An entry of the history in few bytes; of any other dict itself."""
    action = entry.get("action")
    if type(action) is not str or "size" not in entry:
        return entry
    address = entry.get("device_free" if action == "oom" else "addr")
    return Event(action, _size(address), _size(entry["size"]), _size(entry.get("time_us")), entry.get("frames"))


def _rows(device: Device, rank: int, step: int | None, notes: Notes) -> Iterator[Row]:
    events, end = device.events, len(device.events) - 1
    ooms = [index for index, one in enumerate(events) if one.action == "oom"]
    top = peak(events, device.alive)
    shown = {"snapshot": end} | ({"peak": top} if events else {}) | ({"oom": ooms[-1]} if ooms else {})
    if not events:
        notes.remark(
            "a snapshot without a history says nothing of the peak: torch.cuda.memory._record_memory_history keeps one"
        )
    found = moments(events, device.alive, device.reserved, {*shown.values(), *ooms[-SHORTAGES:]})
    found[end] = Moment(end, device.alive, device.reserved)
    kinds = Kinds(events, notes)
    for instant, index in shown.items():
        yield from _memory(instant, found[index], kinds, device, rank, step)
    fullest = found[ooms[-1]] if ooms else found[top]
    yield from _made(fullest, kinds, rank, step)
    for index in ooms[-SHORTAGES:]:
        one, moment = events[index], found[index]
        short = Shortage(
            where=f"rank {rank}", said=Said(asked=one.size, free=one.address), allocated=moment.allocated,
            reserved=moment.reserved, peak=None, held=kinds.held(moment),
        )  # fmt: skip
        row = finding(short)
        if (place := kinds.place(one.frames)) is not None:
            row.evidence = [*(row.evidence or ()), f"asked for at {place}"]
        row.rank, row.step, row.stage, row.t_ns = rank, step, kinds.stage(one.frames), one.time_us * 1000
        yield row
    if len(ooms) > SHORTAGES:
        notes.remark(
            f"rank {rank} ran out of memory {len(ooms):,} times in this history; the last {SHORTAGES} are told of"
        )
    for name, value in (
        ("inactive_split_bytes", device.inactive_split),
        ("largest_free_block_bytes", device.largest_free),
    ):
        yield MetricRow(name=f"memory/{name}", raw_name=name, value=float(value), step=step, rank=rank)


def _memory(
    instant: str, moment: Moment, kinds: Kinds, device: Device, rank: int, step: int | None
) -> Iterator[MemoryRow]:
    """The whole of one moment and the kinds of it; the stage is that of who asked last."""
    last = device.events[moment.event] if 0 <= moment.event < len(device.events) else None
    told: dict[str, Any] = {"instant": instant, "rank": rank, "step": step, "t_ns": last.time_us * 1000 if last else -1}
    stage = kinds.stage(last.frames) if last and instant != "snapshot" else None
    allocated, reserved = moment.allocated, moment.reserved
    yield MemoryRow(
        kind="total", stage=stage, allocated=allocated, reserved=reserved or None,
        fragmentation=1 - allocated / reserved if reserved >= allocated > 0 else None, **told,
    )  # fmt: skip
    sums: dict[str, int] = {}
    for one in kinds.held(moment):
        sums[one.kind] = sums.get(one.kind, 0) + one.bytes
    yield from (MemoryRow(kind=kind, stage=stage, allocated=size, **told) for kind, size in sums.items())


def _made(moment: Moment, kinds: Kinds, rank: int, step: int | None) -> Iterator[MemoryRow]:
    """A row for each stage that made something and each kind of it."""
    sums: dict[tuple[str, str], int] = {}
    for one in kinds.held(moment):
        if one.stage is not None:
            sums[one.stage, one.kind] = sums.get((one.stage, one.kind), 0) + one.bytes
    for (stage, kind), size in sums.items():
        yield MemoryRow(instant="made", kind=kind, stage=stage, allocated=size, rank=rank, step=step)


def _devices(found: Any, source: Source) -> list[Device]:
    """Each GPU by its index. Raises BadInput where the file is no snapshot."""
    snapshot = {"segments": found} if isinstance(found, list) else found  # so torch.cuda.memory_snapshot gives it
    segments = snapshot.get("segments") if isinstance(snapshot, dict) else None
    if not isinstance(segments, list):
        has = (
            f"its keys are {', '.join(map(str, list(snapshot)[:5]))}"
            if isinstance(snapshot, dict)
            else "it holds no dict"
        )
        raise BadInput(f"{source.path} is no memory snapshot: {has[:200]}, and none is `segments`")
    seen: set[int] = set()
    devices = []
    for trace in _fresh(snapshot.get("device_traces"), list, seen):
        devices.append(Device(events=[one for one in trace if type(one) is Event]))
    for segment in _fresh(segments, dict, seen):
        index = segment.get("device", 0)
        if type(index) is not int or not 0 <= index < MOST_DEVICES:
            continue
        devices += [Device() for _ in range(index + 1 - len(devices))]
        _add(devices[index], segment, seen)
    return devices


def _add(device: Device, segment: Mapping[str, Any], seen: set[int]) -> None:
    """One segment: what the driver was asked for at once, cut into blocks that follow each other."""
    device.reserved += _size(segment.get("total_size"))
    address, free, used = _size(segment.get("address")), 0, False
    blocks: list[Any] = next(_fresh([segment.get("blocks")], list, seen), [])
    for block in _fresh(blocks, dict, seen):
        size = _size(block.get("size"))
        if block.get("state") == "active_allocated":
            used = True
            device.alive[_size(block.get("address")) or address] = Block(size, _frames_of(block))
        elif block.get("state") == "inactive":
            free += size
            device.largest_free = max(device.largest_free, size)
        else:  # given back, and another stream may still work on it
            used = True
        address += size
    if used:
        device.inactive_split += free


def _frames_of(block: Mapping[str, Any]) -> Any:
    history = block.get("history")
    if "frames" not in block and isinstance(history, list) and history and isinstance(history[0], dict):
        return history[0].get("frames")
    return block.get("frames")


def _rest(stack: Sequence[Any]) -> dict[str, Any]:
    """The segments of a torn file where they are whole. A history is played back from its end, and that is missing."""
    for key, value, following in zip(stack, stack[1:], stack[2:], strict=False):
        if key == "segments" and following == "device_traces":
            return {"segments": value}
    return {}


def _fresh(values: Any, kind: type[T], seen: set[int]) -> Iterator[T]:
    """Those of a list that are of this kind, each object once: a pickle may name one a million times."""
    for value in values if isinstance(values, Iterable) else ():
        if type(value) is kind and id(value) not in seen:
            seen.add(id(value))
            yield value


def _size(value: Any) -> int:
    return value if type(value) is int and 0 <= value < SIZES else 0
