"""A run as a Chrome trace: ui.perfetto.dev, chrome://tracing and whatever reads traces of torch.profiler open it.

A process a rank with threads for stages, phases, communication and waits; memory and metrics as counters; arrows along the way of
one sample. All ranks stand on one clock; times are µs after `baseTimeNanoseconds`. Format: "Trace Event Format" of Chromium.
Steps and collectives carry the names that torch's own traces have (`ProfilerStep#3`, `c10d::all_reduce`), so that their readers know them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import msgspec

from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger
from flowledger.show.export_lanes import PHASES, RUN, STAGES, Lanes
from flowledger.show.export_path import Path, path_of
from flowledger.show.export_rows import (
    Numbers,
    Steps,
    begin_ns,
    check_steps,
    has_numbers,
    kept,
    metrics,
    readings,
    spans,
    told,
)
from flowledger.show.words import human_number

Event = dict[str, Any]
KINDS = ("param", "grad", "optimizer", "activation", "kv_cache", "comm_buffer", "temporary", "batch")
COUNTERS = (  # name, columns of a reading
    ("memory by kind (bytes)", KINDS),
    ("residue (bytes)", ("residue",)),
    ("allocator (bytes)", ("allocated", "reserved")),
    ("used on device and host (bytes)", ("device_used", "host_used")),
)
TOLD = (
    "name", "span_kind", "step", "role", "rank", "stage", "phase", "epoch", "mini_batch", "micro_batch", "policy_version", "latency_ms",
    "device_ms", "comm_type", "group", "peer_ranks", "bytes", "tokens_logical", "tokens_valid", "tokens_computed", "sample_id", "waited_seconds", "waited_for",
    "id", "parent", "process",
)  # fmt: skip
STEP_NAMES = ("step", "rl_step")


def write(ledger: Ledger, file: BinaryIO, steps: Steps, sample: str | None, more: Numbers) -> list[str]:
    """Write the trace; what is left out of it and why, a line each. Raises BadInput where there is nothing to draw.

    sample: whose way the arrows go, else the most telling one; more: numbers that are no rows of the ledger.
    """
    check_steps(ledger, steps)
    path = path_of(ledger, sample, steps)
    trace = _Trace(ledger, steps, path, more)
    encode = msgspec.json.Encoder().encode
    head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": trace.base, "flowledgerRun": ledger.run}
    file.write(encode(head)[:-1] + b',"traceEvents":[\n')
    separator = b""
    for event in trace.events():
        file.write(separator + encode(event))
        separator = b",\n"
    file.write(b"\n]}\n")
    return trace.left_out(sample)


class _Trace:
    """The events of one run. `base`: the first moment, in ns of the wall's clock."""

    def __init__(self, ledger: Ledger, steps: Steps, path: Path | None, more: Numbers) -> None:
        self._ledger, self._steps, self._path, self._more = ledger, steps, path, more
        self._lanes = Lanes(ledger)
        self._order = path.order() if path is not None else {}
        self._stops: dict[int, Event] = {}
        self._seen = {"intervals": 0, "readings of memory": 0, "metrics": 0}
        self._timeless: set[str] = set()
        self._unmade: dict[str, str] = {}  # what -> why
        self.base = self._first()

    def events(self) -> Iterator[Event]:
        """Every event, intervals first behind the names of the ranks."""
        yield from self._lanes.ranks()
        for row in self._spans():
            self._seen["intervals"] += 1
            yield from self._interval(row)
        for row in kept("readings of memory", readings(self._ledger, self._steps), self._unmade):
            self._seen["readings of memory"] += 1
            yield from self._reading(row)
        for row in kept("metrics", metrics(self._ledger, self._steps, self._more), self._unmade):
            yield from self._metric(row)
        yield from self._arrows()

    def _spans(self) -> Iterator[Event]:
        """The intervals; without how long ranks waited, where that cannot be worked out."""
        what = "how long ranks waited"
        yield from kept(what, spans(self._ledger, self._steps, waits=True), self._unmade)
        if what in self._unmade:
            yield from kept("intervals", spans(self._ledger, self._steps), self._unmade)

    def left_out(self, asked: str | None) -> list[str]:
        """What a reader of the trace would look for and not find."""
        run = self._ledger.run
        said = [f"{what} of {run} cannot be made, {why}: left out" for what, why in self._unmade.items()]
        for what, number in self._seen.items():
            if not number and what not in self._unmade and not (what == "metrics" and self._timeless):
                said.append(f"{run} has no {what}: the trace has none")
        if self._timeless:
            said.append(
                f"{len(self._timeless)} metrics have steps and no times: they are left out (--to tensorboard has them)"
            )
        if self._path is None or len(self._stops) < 2:
            who = f"sample {asked}" if asked else "a sample"
            said.append(f"where {who} went is not recorded with times: no arrows (record.level samples or tokens)")
        return said

    def _first(self) -> int:
        """Raises BadInput for a run without a time: a plan, a log without clock."""
        found = begin_ns(self._ledger, self._steps)
        if found is None:
            more = (
                "parquet, csv and tensorboard write"
                if self._more or has_numbers(self._ledger)
                else "parquet and csv write"
            )
            raise BadInput(
                f"{self._ledger.run} has nothing that happened at a known time (no intervals, no readings of memory): "
                f"a trace would be empty; --to {more} what there is"
            )
        return found

    def _ts(self, ns: int) -> float:
        return (ns - self.base) / 1000

    def _interval(self, row: Mapping[str, Any]) -> Iterator[Event]:
        """A span; one that never ended begins and does not end, which viewers draw to the end of the trace."""
        began, ended = row["began_ns"], row["ended_ns"]
        event: Event = {"name": _name(row), "cat": _category(row), "ts": self._ts(began), "args": _args(row)}
        if row["sample_id"] is not None and row["span_kind"] in (
            "host",
            "wait",
        ):  # requests overlap: each has a track of its own
            pid = yield from self._lanes.process(row["process"])
            request = {**event, "cat": "request", "id": row["sample_id"], "pid": pid, "tid": 0}
            yield {**request, "ph": "b"}
            if ended is not None:
                yield {
                    "name": event["name"],
                    "cat": "request",
                    "id": row["sample_id"],
                    "pid": pid,
                    "tid": 0,
                    "ph": "e",
                    "ts": self._ts(ended),
                }
            return
        pid, tid = yield from self._lanes.place(row["process"], _thread(row), began, ended)
        event |= {"pid": pid, "tid": tid}
        yield {**event, "ph": "B"} if ended is None else {**event, "ph": "X", "dur": (ended - began) / 1000}
        if (at := self._order.get((row["process"], row["id"]))) is not None:
            self._stops[at] = {"pid": pid, "tid": tid, "ts": self._ts(began)}

    def _reading(self, row: Mapping[str, Any]) -> Iterator[Event]:
        pid = yield from self._lanes.process(row["process"])
        for name, columns in COUNTERS:
            if values := {column: row[column] for column in columns if row[column] is not None}:
                yield {"name": name, "ph": "C", "pid": pid, "tid": 0, "ts": self._ts(row["at_ns"]), "args": values}

    def _metric(self, row: Mapping[str, Any]) -> Iterator[Event]:
        """A number over its step; nan and inf, which no counter can have, as a mark."""
        at = _when(row)
        if at is None:
            self._timeless.add(row["name"])
            return
        self._seen["metrics"] += 1
        pid = yield from self._lanes.process(RUN)
        event = {"name": row["name"], "pid": pid, "tid": 0, "ts": self._ts(at)}
        if row["special"] is not None:
            said = f"{row['name']} = {row['special']}"
            yield {**event, "name": said, "cat": "metric", "ph": "i", "s": "p", "args": told(row, ("step", "raw_name"))}
        elif row["value"] is not None:
            yield {**event, "ph": "C", "args": {"value": row["value"]}}

    def _arrows(self) -> Iterator[Event]:
        """From each interval that had the sample to the next."""
        if self._path is None or len(self._stops) < 2:
            return
        last = max(self._stops)
        name = f"sample {self._path.sample}"
        for at, (place, stop) in enumerate(sorted(self._stops.items())):
            phase = "s" if at == 0 else "f" if place == last else "t"
            yield {"name": name, "cat": "sample", "ph": phase, "id": 1, **stop, **({} if phase == "s" else {"bp": "e"})}


def _when(row: Mapping[str, Any]) -> int | None:
    """Where the number of a step stands: at the step's begin, else when it was told."""
    at: int | None = row["began_ns"] if row["began_ns"] is not None else row["told_ns"]
    return at


def _is_step(row: Mapping[str, Any]) -> bool:
    return row["stage"] is None and row["name"] in STEP_NAMES and row["span_kind"] != "comm"


def _thread(row: Mapping[str, Any]) -> str:
    return STAGES if _is_step(row) or row["span_kind"] == "stage" else PHASES.get(row["span_kind"], "host")


def _name(row: Mapping[str, Any]) -> str:
    """What a viewer writes on it: a step and a collective as torch's traces name them, a micro-batch with its number."""
    if _is_step(row) and row["step"] is not None:
        return f"ProfilerStep#{row['step']}"
    if row["span_kind"] == "comm" and row["comm_type"]:
        return f"c10d::{row['comm_type']}"
    if row["span_kind"] == "stage":
        return str(row["stage"] or row["name"])
    name: str = row["name"]
    number = (
        row.get(name)
        if name in ("epoch", "mini_batch", "micro_batch")
        else row["micro_batch"]
        if name.endswith("micro_batch")
        else None
    )
    return name if number is None else f"{name} {human_number(number)}"


def _category(row: Mapping[str, Any]) -> str:
    """`user_annotation` is what importers of torch's traces take: steps, stages and collectives."""
    if _is_step(row) or row["span_kind"] in ("stage", "comm"):
        return "user_annotation"
    return str(row["span_kind"])


def _args(row: Mapping[str, Any]) -> Event:
    """The ledger's columns; of a collective also what a trace of torch's says of it."""
    args = told(row, TOLD)
    if row["span_kind"] == "comm":
        if row["comm_type"]:
            args["Collective name"] = row["comm_type"]
        if row["peer_ranks"]:
            args["Process Group Ranks"] = str(row["peer_ranks"])
        if row["bytes"] is not None:
            args |= {"dtype": "Byte", "In msg nelems": row["bytes"], "Out msg nelems": row["bytes"]}
    return args
