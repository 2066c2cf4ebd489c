"""Spans of a profiler's trace: its steps, what people annotated, and every collective with its size and its ranks."""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from flowledger.flow.comm import comm_type
from flowledger.flow.errors import BadInput
from flowledger.ledger.rows import MetricRow, SpanRow
from flowledger.record.importers.intervals import Interval
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.trace_clocks import SINCE_1970, Meeting
from flowledger.record.importers.trace_events import TraceEvent
from flowledger.tables.traces import dtype_bytes, stage

MOST_COLLECTIVES, MOST_ANNOTATIONS = 20_000, 10_000  # of one file that become spans; the others are counted
MOST_NAMES = 1_000
UNTOLD = ("", "send", "recv")  # kinds of which it is not told who takes part
DEEPEST = 16  # annotations that may lie around a moment, or have ended before it since the one around it began
_numbers = count(1 << 40)  # of spans, for all files of an import


class Collective(NamedTuple):
    """One call. Times in microseconds."""

    start: float
    end: float
    name: str
    kind: str  # empty: not known
    bytes: int | None
    group: str | None
    ranks: str  # as they were written, or the group's name


class Sum(NamedTuple):
    """All calls of one kind."""

    calls: int = 0
    microseconds: float = 0.0
    bytes: int = 0


class Spans:
    """The spans of one file, until all that is needed to write them is known."""

    def __init__(self) -> None:
        self._collectives: list[Collective] = []
        self._annotations: list[tuple[float, float, str]] = []
        self._stages: dict[bool, list[tuple[float, float, str]]] = {True: [], False: []}  # on the device, on the host
        self._sums: dict[str, Sum] = {}
        self._left_out = {"collectives": 0, "annotations": 0}

    def __bool__(self) -> bool:
        """Whether there is anything to write."""
        return bool(self._collectives or self._annotations)

    def collective(self, event: TraceEvent, kind: str) -> None:
        """A kernel or an annotation that communicates."""
        about = event.details
        kind = _kind(about.get("Collective name")) or kind
        size = _bytes(about, kind)
        known = kind or event.name[:80]
        if known in self._sums or len(self._sums) < MOST_NAMES:
            before = self._sums.get(known, Sum())
            self._sums[known] = Sum(before.calls + 1, before.microseconds + event.dur, before.bytes + (size or 0))
        if len(self._collectives) >= MOST_COLLECTIVES:
            self._left_out["collectives"] += 1
            return
        group = about.get("Process Group Description") or about.get("Process Group Name")
        ranks = about.get("Process Group Ranks") or about.get("Process Group Name") or ""
        self._collectives.append(
            Collective(event.ts, event.ts + event.dur, event.name[:200], kind, size, str(group)[:80] if group else None, str(ranks)[:4000])
        )  # fmt: skip

    def no_collectives(self) -> None:
        """Forget those of the host."""
        self._collectives, self._sums, self._left_out["collectives"] = [], {}, 0

    def annotation(self, event: TraceEvent, *, on_device: bool) -> None:
        """What somebody wrote record_function around; a device repeats it around the work that was asked for in it."""
        end, meant = event.ts + event.dur, stage(event.name)
        if meant is not None and len(self._stages[on_device]) < MOST_ANNOTATIONS:
            self._stages[on_device].append((event.ts, end, meant))
        if on_device:
            return
        if len(self._annotations) < MOST_ANNOTATIONS:
            self._annotations.append((event.ts, end, event.name[:200]))
        else:
            self._left_out["annotations"] += 1

    def sums(self, rank: int | None) -> Iterator[MetricRow]:
        """Calls, time and bytes of each kind of collective in the whole trace."""
        for kind, one in sorted(self._sums.items()):
            figures = {"time_s": one.microseconds * 1e-6, "calls": one.calls, "bytes": one.bytes}
            for name, value in figures.items():
                if value:
                    called = f"collective_{name}/{kind}"
                    yield MetricRow(name=called, raw_name=called, value=float(value), rank=rank)

    def rows(
        self, steps: Mapping[int, Interval], about: Mapping[str, Any], rank: int | None, name: str, notes: Notes
    ) -> Iterator[SpanRow]:
        """Steps, annotations and collectives, each kind in order of time."""
        base, groups = about.get("baseTimeNanoseconds"), _groups(about)
        origin = base if type(base) is int and 0 < base < 1 << 62 else 0
        clock = _Clock(origin, steps, rank)
        peers = {written: _ranks(written, groups) for written in {one.ranks for one in self._collectives}}
        collectives = sorted(self._collectives)
        clock.move(notes.clocks.shift(
            clock.meetings(collectives, peers), rank, told=origin > 0 or any(one.start > SINCE_1970 for one in collectives[:1]),
            remark=lambda text: notes.remark(f"{name}: {text}"),
        ))  # fmt: skip
        within = _Stages(self._stages[True] or self._stages[False])
        for step, (start, end) in steps.items():
            yield clock.span(start, end, name="step", span_kind="stage", step=step)
        for start, end, said in sorted(self._annotations):
            meant = stage(said)
            yield clock.span(start, end, name=meant or said, span_kind="stage" if meant else "host", stage=meant)
        for one in collectives:
            row = clock.span(one.start, one.end, name=one.name, span_kind="comm", comm_type=one.kind or None)
            row.stage = within.at(one.start)
            row.bytes, row.group = one.bytes, one.group
            row.peer_ranks = peers[one.ranks] if one.kind not in UNTOLD else None
            yield row
        for what, number in self._left_out.items():
            if number:
                notes.remark(
                    f"{name}: {number:,} more {what} than the first are in the sums and stand in no span of their own"
                )


class _Stages:
    """The stage at a moment: of those that people annotated the one that began last and has not ended."""

    def __init__(self, found: list[tuple[float, float, str]]) -> None:
        self._found = sorted(found)
        self._starts = [start for start, _, _ in self._found]

    def at(self, moment: float) -> str | None:
        last = bisect_right(self._starts, moment)
        return next((stage for _, end, stage in self._found[max(last - DEEPEST, 0) : last][::-1] if moment < end), None)


class _Clock:
    """From microseconds of a trace to spans on the wall's clock."""

    def __init__(self, base: int, steps: Mapping[int, Interval], rank: int | None) -> None:
        self._base, self._rank = base, rank
        self._steps = sorted((start, end, step) for step, (start, end) in steps.items())
        self._at = 0

    def move(self, nanoseconds: int) -> None:
        self._base += nanoseconds

    def meetings(
        self, collectives: Sequence[Collective], peers: Mapping[str, list[int] | None]
    ) -> dict[Meeting, tuple[int, int]]:
        """From when to when it was in each collective of which all ranks are told."""
        times: Counter[tuple[str, tuple[int, ...], int | None]] = Counter()
        found = {}
        for one in collectives:
            ranks = peers[one.ranks] if one.kind not in UNTOLD else None
            if ranks is not None and len(ranks) > 1:
                key = one.kind, tuple(sorted(ranks)), self._step(one.start)
                found[*key, times[key]] = self._base + round(one.start * 1000), self._base + round(one.end * 1000)
                times[key] += 1
        return found

    def span(self, start: float, end: float, *, step: int | None = None, **more: Any) -> SpanRow:
        first, last = self._base + round(start * 1000), self._base + round(end * 1000)
        return SpanRow(
            id=next(_numbers), event="whole", start_ns=first, end_ns=last, t_ns=last, latency_ms=(end - start) / 1000,
            step=self._step(start) if step is None else step, rank=self._rank, **more,
        )  # fmt: skip

    def _step(self, start: float) -> int | None:
        """The step in which something began; what is asked for comes in order of time, kind by kind."""
        if self._at >= len(self._steps) or (self._at and start < self._steps[self._at][0]):
            self._at = 0
        while self._at < len(self._steps) and self._steps[self._at][1] <= start:
            self._at += 1
        here = self._steps[self._at] if self._at < len(self._steps) else None
        return here[2] if here is not None and here[0] <= start else None


def _kind(name: Any) -> str:
    """What the profiler calls a collective, in the ledger's words; empty where it is none."""
    try:
        return comm_type(str(name).removesuffix("v")).name if name else ""
    except BadInput:
        return ""


def _bytes(about: Mapping[str, Any], kind: str) -> int | None:
    """The size as flow/comm.py defines it: of a gather the output, of a scatter the input, of others they are the same."""
    size = dtype_bytes(str(about.get("dtype")))
    numbers = [about.get(key) for key in ("In msg nelems", "Out msg nelems")]
    whole = [number for number in numbers if type(number) is int and 0 <= number < 1 << 50]
    if size is None or not whole:
        return None
    return (whole[0] if kind == "all_to_all" else max(whole)) * size


def _groups(about: Mapping[str, Any]) -> dict[str, list[int]]:
    """Name of a process group -> its ranks."""
    info = about.get("distributedInfo")
    listed = info.get("pg_config") if isinstance(info, dict) else None
    found = {}
    for one in listed if isinstance(listed, list) else ():
        if isinstance(one, dict) and isinstance(one.get("ranks"), list):
            found[str(one.get("pg_name"))] = [rank for rank in one["ranks"] if type(rank) is int]
    return found


def _ranks(written: str, groups: Mapping[str, list[int]]) -> list[int] | None:
    """`[0, 1]`, or the name of a group, which goes without saying where there is only one. A list cut short (`...`) is not known."""
    if not written and len(groups) == 1:
        return next(iter(groups.values()))
    if written in groups:
        return groups[written]
    if "..." in written or not written.startswith("["):
        return None
    return [int(number) for number in re.findall(r"\d{1,9}", written)] or None
