"""The planned lifetime table: where each tensor is born, who reads it, where it dies, and what each stage hands on."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flowledger.flow.stages import order
from flowledger.flow.tensors import Tensor, stage_of, tensor, tensors
from flowledger.ledger.rows import StorageRow, TensorRow

Fate = dict[str, Any]


def lifetimes(
    rows: Sequence[TensorRow], stages: Sequence[str], stand_ins: Mapping[str, str] = MappingProxyType({})
) -> list[Fate]:
    """One row a tensor and birth, in the order of the flow; bytes are those of its largest form on one rank.

    `stand_ins`: tensor that nobody makes -> the one whose storage it is.
    """
    places = [name for name in order() if name in stages]
    sizes: dict[tuple[str, str | None], int] = {}
    for row in rows:
        key = (row.tensor_name, row.stage)
        sizes[key] = max(sizes.get(key, 0), row.bytes or 0)
    found = [
        fate
        for row in tensors().values()
        for fate in _fates(
            row,
            tensor(stand_ins.get(row.name, row.name)).written_by,
            [name for name in places if (row.name, name) in sizes or not _meets(row, name)],
            sizes,
        )
    ]
    return sorted(found, key=lambda fate: places.index(stage_of(fate["born_at"])))


def _meets(row: Tensor, name: str) -> bool:
    """Whether the flow has a stage write or read a tensor; the shape ledger may not: one rank alone, a KL of weight 0."""
    return name in map(stage_of, (*row.written_by, *row.readers))


def surviving(fates: Sequence[Fate], stages: Sequence[str]) -> dict[str, list[str]]:
    """Stage -> the tensors that are alive when it ends and go on into the next."""
    places = [name for name in order() if name in stages]
    return {
        name: [
            fate["tensor_name"]
            for fate in fates
            if places.index(stage_of(fate["born_at"])) <= at
            and (fate["freed_at"] is None or places.index(stage_of(fate["freed_at"])) > at)
        ]
        for at, name in enumerate(places)
    }


def storages(
    rows: Sequence[TensorRow], fates: Sequence[Fate], stand_ins: Mapping[str, str] = MappingProxyType({})
) -> list[StorageRow]:
    """Birth and death of each as events of a storage, on each rank that has it; its rows are given the storage's number."""
    fates = [fate for fate in fates if fate["tensor_name"] not in stand_ins]
    numbers = {(fate["tensor_name"], stage_of(fate["born_at"])): number for number, fate in enumerate(fates, 1)}
    names = {name: number for (name, _), number in numbers.items()}
    names |= {name: names[other] for name, other in stand_ins.items()}
    holders: dict[int | None, dict[int | None, None]] = {}  # storage -> the ranks that hold it, in order
    for row in rows:
        row.storage = numbers.get((row.tensor_name, row.stage or ""), names.get(row.tensor_name))
        holders.setdefault(row.storage, {})[row.rank] = None
    found = [
        _event(fate, number, event, place, rank)
        for number, fate in enumerate(fates, 1)
        for rank in holders.get(number, {0: None})
        for event, place in (("born", fate["born_at"]), ("freed", fate["freed_at"]))
        if place is not None
    ]
    for number, one in enumerate(found):
        one.seq = one.t_ns = number
    return found


def _event(fate: Fate, number: int, event: str, place: str, rank: int | None) -> StorageRow:
    stage, _, phase = place.partition("/")
    return StorageRow(
        step=1, stage=stage, phase=phase or None, rank=rank, storage=number, event=event, bytes=fate["bytes"],
        kind=fate["kind"],
    )  # fmt: skip


def _fates(
    row: Tensor, made_in: Sequence[str], places: Sequence[str], sizes: dict[tuple[str, str | None], int]
) -> Iterator[Fate]:
    """A tensor that several stages make for themselves has a fate for each of them."""
    born = [place for place in made_in if stage_of(place) in places]
    own = len({stage_of(place) for place in born}) > 1 and row.lifetime in ("micro_batch", "stage")
    first = list({stage_of(place): place for place in reversed(born)}.values())[::-1]
    for place in first if own else sorted(born, key=lambda one: places.index(stage_of(one)))[:1]:
        readers = [reader for reader in row.readers if stage_of(reader) in places]
        if own:
            readers = [reader for reader in readers if stage_of(reader) == stage_of(place)]
        last = max(readers, key=lambda reader: places.index(stage_of(reader)), default=place)
        yield {
            "tensor_name": row.name,
            "kind": row.kind,
            "born_at": place,
            "readers": list(dict.fromkeys(stage_of(reader) for reader in readers)),
            "last_read_at": None if not readers else last.partition("@")[0],
            "freed_at": _death(row, place, last, places, own=own),
            "lifetime": row.lifetime,
            "owner": row.owner,
            "bytes": max(
                (
                    size
                    for (name, stage), size in sizes.items()
                    if name == row.name and (not own or stage == stage_of(place))
                ),
                default=0,
            ),
        }


def _death(row: Tensor, born: str, last: str, places: Sequence[str], *, own: bool) -> str | None:
    """Where it is freed; None when persistent. A stage that does not run frees nothing: the last reader does then."""
    if row.lifetime == "persistent":
        return None
    due = [place for place in row.released_by if stage_of(place) in places]
    if own:
        due = [place for place in due if stage_of(place) == stage_of(born)]
    return due[0] if due else last.partition("@")[0]
