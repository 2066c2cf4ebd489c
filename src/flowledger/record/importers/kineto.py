"""Traces of torch.profiler (Kineto) and other Chrome traces: what each rank's GPU did, and what hid behind what.

For each step (`ProfilerStep#N`) and for the whole trace, of the time between the first and the last work on the device:
`compute_time_s`, kernels that compute; `comm_time_s`, kernels that communicate; `memcpy_time_s`, copies and fills; each the
length of a union over streams. `comm_overlap` = (compute and communication at once) / comm_time_s, and
`idle_fraction` = the share in which nothing ran, are those of Holistic Trace Analysis (docs/source/features:
comm_comp_overlap, temporal_breakdown). `exposed_comm_s` = comm_time_s less the overlap. A trace without a device is
measured by its operators and the annotations of its collectives. Spans: steps, annotations, collectives.
Format: libkineto/src/output_json.cpp; times are microseconds after `baseTimeNanoseconds`.
"""

import math
import re
from collections.abc import Iterator
from itertools import pairwise

from flowledger.ledger.rows import MetricRow, Row
from flowledger.record.importers.intervals import Interval, Union, lengths
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.source import Source
from flowledger.record.importers.trace_events import START, TraceEvent, TraceEvents
from flowledger.record.importers.trace_ranks import NAMING, rank_of, rank_of_process
from flowledger.record.importers.trace_spans import Spans
from flowledger.tables.traces import collective

PLAIN = re.compile(rb"\s*\[\s*\{")  # a list of events without anything around
PHASES = re.compile(rb'"ph"\s*:\s*"[A-Za-z]"')
STEP = re.compile(r"ProfilerStep#(\d{1,15})")
MOST_STEPS, MOST_PROCESSES = 100_000, 4_096
S = 1e-6  # of a microsecond


def fits(source: Source) -> bool:
    """A JSON with traceEvents, or a list of events with phases."""
    head = source.head
    if START.search(head) is not None:
        return True
    named = source.name.endswith(".json") and any(word in source.name for word in ("trace", "kineto"))
    return (PLAIN.match(head) is not None and PHASES.search(head) is not None) or (
        named and b'"deviceProperties"' in head
    )


def has_its_own_clock(source: Source) -> bool:
    """Whether a trace does not tell where its times begin: it is read after those that do, and put beside them."""
    return b"baseTimeNanoseconds" not in source.head


def read(source: Source, notes: Notes) -> Iterator[Row]:
    """Metrics and spans of one file, which is one rank's; of several where their traces were merged into it."""
    events = TraceEvents(source.chunks(notes), str(source.path), notes)
    devices = Devices()
    for batch in events.batches():
        for event in batch:
            if event.ph == "X":
                take = devices.of(event).takes.get(event.cat)
                if take is not None and 0 <= event.dur < math.inf and abs(event.ts) < math.inf:
                    take(event)
            elif event.ph == "M" and event.name in NAMING:
                devices.named(event)
    own = rank_of(events.about, source, notes)
    by_rank = devices.by_rank(devices.only if own is None else own)
    if devices.late:
        notes.remark(f"{source.path.name}: some of its work stands before the names of the ranks, and has none")
    if not any(device.seen for device in by_rank.values()):
        notes.skip("the trace has neither kernels nor operators", source.path.name)
    for rank, device in by_rank.items():
        yield from device.metrics(rank)
        yield from device.spans.rows(device.steps, events.about, rank, source.path.name, notes)


class Devices:
    """The work of a file by rank: the file's own, but where the names of its processes tell of several ranks."""

    def __init__(self) -> None:
        self.own = Device()
        self._merged: dict[int, Device] = {}
        self._ranks: dict[object, int | None] = {}  # of processes, where their names speak of one
        self._of: dict[object, Device] = {}

    def named(self, event: TraceEvent) -> None:
        """The name of a process, before its events."""
        words = event.details
        if type(event.pid) in (int, str):
            self._learn(event.pid, rank_of_process(words.get("name") or words.get("labels")))

    def of(self, event: TraceEvent) -> "Device":
        """Whose an event is."""
        pid = event.pid
        if type(pid) is str:
            if pid not in self._ranks:
                self._learn(pid, rank_of_process(pid))
        elif not self._of or type(pid) is not int:
            return self.own
        return self._of.get(pid, self.own)

    @property
    def late(self) -> bool:
        """Whether the names of several ranks came behind the work of some."""
        return bool(self._merged) and bool(self.own.seen or self.own.spans)

    @property
    def only(self) -> int | None:
        """The rank that processes are named by, where it is one."""
        ranks = self._told()
        return ranks.pop() if len(ranks) == 1 else None

    def by_rank(self, own: int | None) -> "dict[int | None, Device]":
        """Each rank's work; the file's own where there is no other, or where it has any."""
        found: dict[int | None, Device] = {
            rank: one for rank, one in sorted(self._merged.items()) if one.seen or one.spans
        }
        return found if found and not (self.own.seen or self.own.spans) else {own: self.own, **found}

    def _learn(self, pid: object, rank: int | None) -> None:
        if len(self._ranks) >= MOST_PROCESSES:
            return
        if rank is not None or pid not in self._ranks:
            self._ranks[pid] = rank
        if rank is not None and (len(self._told()) > 1 or type(pid) is str):  # an id of text is made by who merges
            self._of = {one: self._merged.setdefault(of, Device()) for one, of in self._ranks.items() if of is not None}

    def _told(self) -> set[int]:
        return {rank for rank in self._ranks.values() if rank is not None}


class Device:
    """The work of one rank, as its events come by in any order."""

    def __init__(self) -> None:
        self.compute, self.comm, self.memory = Union(), Union(), Union()
        self.on_device = self.seen = False
        self.spans = Spans()
        self._steps: dict[bool, dict[int, Interval]] = {True: {}, False: {}}  # on the device, on the host
        self.takes = {
            "kernel": self._kernel, "Kernel": self._kernel, "gpu_memcpy": self._copy, "gpu_memset": self._copy,
            "Memcpy": self._copy, "Memset": self._copy, "cpu_op": self._operator, "Operator": self._operator,
            "user_annotation": self._annotation, "gpu_user_annotation": self._device_annotation,
        }  # fmt: skip

    @property
    def steps(self) -> dict[int, Interval]:
        """Step -> from when to when; none reaches into the next."""
        found = self._steps[self.on_device] or self._steps[False]
        ordered = sorted((start, end, step) for step, (start, end) in found.items())
        begins = [start for start, _, _ in ordered] + [math.inf]
        return {step: (start, min(end, after)) for (start, end, step), after in zip(ordered, begins[1:], strict=True)}

    def metrics(self, rank: int | None) -> Iterator[MetricRow]:
        """The figures of each step, then those of the whole."""
        steps = self.steps
        edges = sorted({edge for window in steps.values() for edge in window})
        edges = [-math.inf, *edges, math.inf]
        windows = list(pairwise(edges))
        two = [self.compute, self.comm]
        unions = [[self.compute], [self.comm], [self.memory], two, [*two, self.memory]]
        parts = list(zip(*(lengths(one, windows) for one in unions), strict=True))
        at = {window[0]: part for window, part in zip(windows, parts, strict=True)}
        for step, (start, end) in steps.items():
            yield from _figures(at.get(start, parts[0]), end - start, step, rank)
        if self.seen:
            first, last = self._bounds()
            yield from _figures(tuple(map(sum, zip(*parts, strict=True))), last - first, None, rank)
        yield from self.spans.sums(rank)

    def _bounds(self) -> Interval:
        ends = [edge for union in (self.compute, self.comm, self.memory) for edge in union.bounds()]
        return min(ends), max(ends)

    def _kernel(self, event: TraceEvent) -> None:
        self._found_device()
        kind = collective(event.name)
        if kind is None:
            self.compute.add(event.ts, event.ts + event.dur)
        else:
            self.comm.add(event.ts, event.ts + event.dur)
            self.spans.collective(event, kind)

    def _copy(self, event: TraceEvent) -> None:
        self._found_device()
        self.memory.add(event.ts, event.ts + event.dur)

    def _operator(self, event: TraceEvent) -> None:
        """Work of the host, which counts where there is no device."""
        if not self.on_device and collective(event.name) is None:
            self.seen = True
            self.compute.add(event.ts, event.ts + event.dur)

    def _annotation(self, event: TraceEvent) -> None:
        self._noted(event, on_device=False)

    def _device_annotation(self, event: TraceEvent) -> None:
        self._noted(event, on_device=True)

    def _noted(self, event: TraceEvent, *, on_device: bool) -> None:
        start, end, steps = event.ts, event.ts + event.dur, self._steps[on_device]
        if (found := STEP.fullmatch(event.name)) is not None:
            step = int(found[1])
            if step in steps:
                start, end = min(start, steps[step][0]), max(end, steps[step][1])
            if step in steps or len(steps) < MOST_STEPS:
                steps[step] = start, end
        elif (kind := collective(event.name)) is None:
            self.spans.annotation(event, on_device=on_device)
        elif not self.on_device and not on_device:
            self.seen = True
            self.comm.add(start, end)
            self.spans.collective(event, kind)

    def _found_device(self) -> None:
        """From the first work of a device on only devices count."""
        if not self.on_device:
            self.on_device = self.seen = True
            self.compute, self.comm = Union(), Union()
            self.spans.no_collectives()


def _figures(part: tuple[float, ...], whole: float, step: int | None, rank: int | None) -> Iterator[MetricRow]:
    """part: microseconds of computing, communication, copies, the first two together, all three together."""
    compute, comm, memory, two, busy = part
    hidden = max(compute + comm - two, 0.0)
    figures = {
        "compute_time_s": compute * S,
        "comm_time_s": comm * S,
        "exposed_comm_s": (comm - hidden) * S,
        "memcpy_time_s": memory * S,
    }
    if comm > 0:
        figures["comm_overlap"] = hidden / comm
    if whole > 0:
        figures["idle_fraction"] = min(max(1 - busy / whole, 0.0), 1.0)
    for name, value in figures.items():
        yield MetricRow(name=name, raw_name=name, value=value, step=step, rank=rank)
