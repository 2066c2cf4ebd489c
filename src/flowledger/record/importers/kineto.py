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
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from flowledger.ledger.rows import MetricRow, Row
from flowledger.record.importers.file_ranks import rank_in
from flowledger.record.importers.intervals import Interval, Union, lengths
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.source import Source
from flowledger.record.importers.trace_events import START, TraceEvent, TraceEvents
from flowledger.record.importers.trace_spans import Spans
from flowledger.tables.traces import collective

PLAIN = re.compile(rb"\s*\[\s*\{")  # a list of events without anything around
PHASES = re.compile(rb'"ph"\s*:\s*"[A-Za-z]"')
STEP = re.compile(r"ProfilerStep#(\d{1,15})")
MOST_STEPS = 100_000
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


def read(source: Source, notes: Notes) -> Iterator[Row]:
    """Metrics and spans of one file, which is one rank's."""
    events = TraceEvents(source.chunks(notes), str(source.path), notes)
    device = Device()
    for batch in events.batches():
        for event in batch:
            take = device.takes.get(event.cat)
            if take is not None and event.ph == "X" and 0 <= event.dur < math.inf and abs(event.ts) < math.inf:
                take(event)
    rank = _rank(events.about, source)
    if not device.seen:
        notes.skip("the trace has neither kernels nor operators", source.path.name)
    yield from device.metrics(rank)
    yield from device.spans.rows(device.steps, events.about, rank, source.path.name, notes)


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


def _rank(about: Mapping[str, Any], source: Source) -> int | None:
    info = about.get("distributedInfo")
    said = info.get("rank") if isinstance(info, dict) else None
    return said if type(said) is int and 0 <= said < 1 << 30 else rank_in(source.path)
