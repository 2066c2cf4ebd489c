"""The fullest moment of every step and stage, found as readings are written: by the rules of `memory_readings` and `peaks`."""

from collections.abc import Sequence
from typing import NamedTuple

from flowledger.flow.kinds import KINDS
from flowledger.show.page.tally_rows import Reading

Place = tuple[str | None, str | None, int | None, int | None, int | None, str]  # stage, phase, epoch … instant
Order = tuple[bool, int, int, int]
PARTS = tuple(kind for kind in KINDS if kind != "residue")
SHOWN = 8  # steps of which every process's peak stays known


class Moment(NamedTuple):
    """One reading of one process: the allocator's numbers, and the kinds side by side."""

    process: int
    step: int
    stage: str | None
    phase: str | None
    epoch: int | None
    mini_batch: int | None
    micro_batch: int | None
    instant: str
    t_ns: int
    kinds: tuple[int | None, ...]  # in the order of PARTS
    residue: int | None
    known: int | None
    allocated: int | None
    reserved: int | None
    reserved_peak: int | None
    device_used: int | None
    host_used: int | None
    limit: int | None
    fragmentation: float | None

    @property
    def peak(self) -> int | None:
        """What counts as its fullness."""
        return self.known if self.instant == "peak" and self.allocated is None else self.allocated


class _Fullest:
    """Of one stage of one step, over all processes."""

    __slots__ = ("live", "peak", "residue")

    def __init__(self) -> None:
        self.peak: int | None = None
        self.residue: int | None = None
        self.live: int | None = None


class _Told:
    """What a process has told of one reading so far: its kinds may come long after what the allocator said."""

    __slots__ = ("first", "kinds", "limit", "t_ns", "total", "used")

    def __init__(self, first: Reading) -> None:
        self.first = first
        self.t_ns = first.t_ns
        self.total: Reading | None = first if first.kind == "total" else None
        self.kinds: dict[str, int] = {} if self.total or first.allocated is None else {first.kind: first.allocated}
        self.limit = first.limit
        self.used = first.device_used, first.host_used

    def add(self, row: Reading) -> None:
        """One row more of the same reading."""
        self.t_ns = max(self.t_ns, row.t_ns)
        self.limit = _most(self.limit, row.limit)
        self.used = _most(self.used[0], row.device_used), _most(self.used[1], row.host_used)
        if row.kind == "total":
            self.total = row if self.total is None else _joined(self.total, row)
        elif row.allocated is not None:
            self.kinds[row.kind] = max(row.allocated, self.kinds.get(row.kind, row.allocated))

    @property
    def order(self) -> Order | None:
        """Live tensors where they were watched stand before the allocator; None where it is no candidate for a peak."""
        allocated = None if self.total is None else self.total.allocated
        if not self.kinds:
            return None if allocated is None else (self.first.instant == "peak", allocated, -1, -self.t_ns)
        parts = [size for kind, size in self.kinds.items() if kind in PARTS]
        known = sum(parts) if parts else -1
        is_peak = self.first.instant == "peak"
        size = known if allocated is None and is_peak and known >= 0 else allocated
        return None if size is None else (is_peak, size, known, -self.t_ns)


class Memory:
    """The memory of a run. `changed`: steps whose peaks are others than when they were taken last."""

    def __init__(self) -> None:
        self.changed: set[int] = set()
        self._stages: dict[int, dict[str | None, _Fullest]] = {}
        self._fullest: tuple[Order, int, _Told] | None = None  # the highest that the allocator said of any step
        self._peaks: dict[int, tuple[Order, int, _Told]] = {}
        self._latest: dict[int, dict[int, tuple[Order, _Told]]] = {}
        self._open: dict[int, dict[int, dict[Place, _Told]]] = {}  # process -> step -> its readings

    def add(self, process: int, rows: Sequence[Reading]) -> None:
        """Rows of one process, in the order in which they were written."""
        steps = self._open.setdefault(process, {})
        number, readings = -1, None
        for row in rows:
            if row.step is None:
                continue
            if row.step != number or readings is None:
                number = row.step
                if number not in steps:
                    self._close(process, number - 1)
                    steps[number] = {}
                    self.changed.add(number)
                readings = steps[number]
            place = row.stage, row.phase, row.epoch, row.mini_batch, row.micro_batch, row.instant
            told = readings.get(place)
            if told is None:
                told = readings[place] = _Told(row)
            else:
                told.add(row)
            if row.kind == "total":
                self.changed.add(number)
                stage = self._stage(number, row.stage)
                size = (
                    row.peak_since_stage
                    if row.allocated is None
                    else row.allocated
                    if row.peak_since_stage is None
                    else max(row.allocated, row.peak_since_stage)
                )
                if size is not None and (stage.peak is None or size > stage.peak):
                    stage.peak = size
                self._compare(process, number, told)

    def settle(self, *, over: bool = False) -> None:
        """Forget each process's part of steps that are past; `over`: nothing more comes."""
        for process in [*self._open] if over else ():
            self._close(process, None)
        for step in sorted(self._latest)[:-SHOWN]:
            del self._latest[step]

    def _close(self, process: int, before: int | None) -> None:
        """All of a process's readings of earlier steps are there: what the allocator said can be held against the kinds."""
        steps = self._open[process]
        for step in [step for step in steps if before is None or step < before]:
            for told in steps.pop(step).values():
                if told.kinds:
                    moment = _moment(process, told)
                    stage = self._stage(step, moment.stage)
                    stage.residue = _most(stage.residue, moment.residue)
                    if moment.instant == "peak":
                        stage.live = _most(stage.live, moment.known)
                    self.changed.add(step)
                    self._compare(process, step, told)

    def _stage(self, step: int, name: str | None) -> _Fullest:
        found = self._stages.get(step)
        if found is None:
            found = self._stages[step] = {}
        stage = found.get(name)
        if stage is None:
            stage = found[name] = _Fullest()
        return stage

    def _compare(self, process: int, step: int, told: _Told) -> None:
        """Hold a reading against the fullest so far: of the process in its step, of the step, of the run."""
        order = told.order
        if order is None:
            return
        latest = self._latest.get(step)
        if latest is None:
            latest = self._latest[step] = {}
        own = latest.get(process)
        if own is None or order > own[0]:
            latest[process] = order, told
            best = self._peaks.get(step)
            if best is None or order > best[0]:
                self._peaks[step] = order, process, told
        if self._fullest is None or (told.total is not None and order[1] > self._fullest[0][1]):
            self._fullest = order, process, told

    @property
    def fullest(self) -> Moment | None:
        """The highest that the allocator said of any process in any step."""
        return _moment(*self._fullest[1:]) if self._fullest else None

    def peak_of(self, step: int) -> Moment | None:
        """The fullest moment of a step, over all processes."""
        found = self._peaks.get(step)
        return _moment(*found[1:]) if found else None

    def peaks_of(self, step: int) -> list[Moment]:
        """The fullest moment of each process in one of the latest steps; of an earlier one nothing."""
        return [_moment(process, told) for process, (_, told) in self._latest.get(step, {}).items()]

    def stages_of(self, step: int) -> dict[str | None, int | None]:
        """stage -> its peak in bytes: the allocator's, or live tensors with what they leave unexplained in the step."""
        found = self._stages.get(step, {})
        unexplained = max((one.residue for one in found.values() if one.residue is not None), default=None)
        return {
            stage: _most(one.peak, None if one.live is None or unexplained is None else one.live + unexplained)
            for stage, one in found.items()
        }


def _moment(process: int, told: _Told) -> Moment:
    first, total = told.first, told.total
    kinds = tuple(told.kinds.get(kind) for kind in PARTS)
    known = None if all(size is None for size in kinds) else sum(size or 0 for size in kinds)
    allocated, reserved = (total.allocated, total.reserved) if total else (None, None)
    residue = told.kinds.get("residue") if known is None or allocated is None else allocated - known
    said = total.fragmentation if total else None
    return Moment(
        process, first.step or 0, first.stage, first.phase, first.epoch, first.mini_batch, first.micro_batch, first.instant,
        told.t_ns, kinds, residue, known, allocated, reserved, total.reserved_peak_since_stage if total else None,
        *told.used, told.limit,
        said if said is not None else 1 - allocated / reserved if allocated is not None and reserved else None,
    )  # fmt: skip


def _joined(one: Reading, other: Reading) -> Reading:
    """The larger of each number of two."""
    return Reading(
        one.kind, one.instant, max(one.t_ns, other.t_ns), one.step, one.stage, one.phase, one.epoch, one.mini_batch, one.micro_batch,
        _most(one.allocated, other.allocated), _most(one.reserved, other.reserved), _most(one.peak_since_stage, other.peak_since_stage),
        _most(one.reserved_peak_since_stage, other.reserved_peak_since_stage), None, None, None,
        other.fragmentation if one.fragmentation is None else one.fragmentation if other.fragmentation is None else max(one.fragmentation, other.fragmentation),
    )  # fmt: skip


def _most(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else max(one, other)
