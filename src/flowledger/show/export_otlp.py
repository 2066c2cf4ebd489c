"""A run as OpenTelemetry has it: a trace a step with its stages and phases, one for a sample, and a gauge a metric.

Plain data, which `export_otlp_post` sends. Numbers of traces and spans follow from what they name: what is sent twice is the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from typing import Any

from flowledger.ledger.reader import Ledger
from flowledger.show.export_path import Path
from flowledger.show.export_rows import Numbers, Steps, metrics, spans, told
from flowledger.tables.metrics import find

KINDS = ("stage", "compute", "host")  # of spans that are sent: collectives and waits are too many, a trace has them
TOLD = (
    "step", "stage", "phase", "role", "rank", "epoch", "mini_batch", "micro_batch", "policy_version", "device_ms", "tokens_logical",
    "tokens_valid", "tokens_computed", "bytes", "sample_id", "process",
)  # fmt: skip
UNITS = {
    "s": "s",
    "bytes": "By",
    "fraction": "1",
    "tokens": "{token}",
    "tokens/s": "{token}/s",
    "samples": "{sample}",
}  # of UCUM
ROOTS = """
SELECT step, min(start_ns + apart) AS began_ns, max(greatest(end_ns, start_ns) + apart) AS ended_ns,
    count(DISTINCT process) > 1 OR NOT bool_or(stage IS NULL AND span_kind <> 'comm' AND name IN ('step', 'rl_step')) AS is_needed
FROM spans_view JOIN (SELECT process, CASE WHEN source = 'import' THEN 0 ELSE apart END AS apart FROM clocks JOIN processes USING (process)) USING (process)
WHERE source <> 'plan' AND step BETWEEN ? AND ? GROUP BY step ORDER BY step
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span; `trace`, `span` and `parent` are hexadecimal as OpenTelemetry writes them."""

    trace: str
    span: str
    parent: str | None = None
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    links: tuple[tuple[str, str, Mapping[str, Any]], ...] = ()  # trace, span, attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """A metric and its numbers: (time in ns, value, attributes)."""

    name: str
    unit: str
    description: str
    points: tuple[tuple[int, float, Mapping[str, Any]], ...]


def traces(ledger: Ledger, steps: Steps, path: Path | None) -> Iterator[Span]:
    """Each step as a trace, its stages and phases within; several ranks, or stages without a step, under one root. Then the sample."""
    names = _Names(ledger)
    of_steps = ledger.rows(ROOTS, steps.bounds)
    roots = {row["step"]: row for row in of_steps if row["is_needed"]}
    heard = max((row["ended_ns"] for row in of_steps), default=0)
    for step, row in roots.items():
        yield Span(
            trace=names.trace(step), span=names.root(step), name=f"step {step}", start_ns=row["began_ns"],
            end_ns=row["ended_ns"], attributes={"flowledger.step": step},
        )  # fmt: skip
    sent: set[tuple[str, int]] = set()
    under = {step: names.root(step) for step in roots}
    for row in spans(ledger, steps, KINDS):
        process, step = row["process"], row["step"]
        known = row["parent"] is not None and (process, row["parent"]) in sent
        # a parent that was killed before it was written leaves its children to the step
        above = names.span(process, row["parent"]) if known else under.get(step)
        sent.add((process, row["id"]))
        yield _span(row, names, above, heard)
        if above is None and step is not None:
            under[step] = names.span(process, row["id"])
    if path is not None:
        yield _journey(path, names)


def gauges(ledger: Ledger, steps: Steps, more: Numbers) -> Iterator[Gauge]:
    """Each metric with its numbers of all steps, at the times when they were told; those without a time are left out."""
    rows = [row for row in metrics(ledger, steps, more) if row["told_ns"] is not None or row["began_ns"] is not None]
    rows.sort(key=lambda row: (row["name"], row["step"]))
    for name, group in groupby(rows, lambda row: row["name"]):
        known = find(name)
        points = tuple(
            (row["told_ns"] if row["told_ns"] is not None else row["began_ns"], value, {"flowledger.step": row["step"]})
            for row in group
            if (value := float(row["special"]) if row["special"] is not None else row["value"]) is not None
        )
        if points:
            unit, said = (known.unit, known.definition) if known else ("", "")
            yield Gauge(name=f"flowledger.{name}", unit=UNITS.get(unit, ""), description=said, points=points)


def resource(ledger: Ledger) -> dict[str, str]:
    """What all of it belongs to."""
    manifest = ledger.directory.manifest
    return {
        "service.name": "flowledger", "service.instance.id": f"{ledger.run}@{manifest.created}", "flowledger.run": ledger.run,
        "flowledger.framework": " ".join(filter(None, (manifest.framework, manifest.framework_version))),
    }  # fmt: skip


def left_out(ledger: Ledger, steps: Steps, path: Path | None, spans: int, numbers: int) -> list[str]:
    """What a reader would look for there and not find, a line each."""
    said = [
        f"{ledger.run} has no {what}"
        for what, number in (("intervals", spans), ("numbers with a time", numbers))
        if not number
    ]
    first, last = steps.bounds
    (row,) = ledger.rows(
        "SELECT count(*) AS n FROM spans_view WHERE span_kind IN ('comm', 'wait') AND source <> 'plan' "
        f"AND coalesce(step, {first}) BETWEEN {first} AND {last}"
    )
    if row["n"]:
        said.append(f"{row['n']:,} collectives and waits are not sent (--to perfetto has them)")
    if spans and path is None:
        said.append("where a sample went is not recorded with times: no trace of one (record.level samples or tokens)")
    return said


class _Names:
    """Numbers of traces and spans, made of what they name."""

    def __init__(self, ledger: Ledger) -> None:
        self._run = f"{ledger.run}|{ledger.directory.manifest.created}"

    def trace(self, of: object) -> str:
        return self._number(f"trace {of}", 16)

    def root(self, step: int) -> str:
        return self._number(f"root {step}", 8)

    def span(self, process: str, number: int) -> str:
        return self._number(f"span {process} {number}", 8)

    def _number(self, what: str, size: int) -> str:
        return blake2b(f"{self._run}|{what}".encode(), digest_size=size).hexdigest()


def _span(row: Mapping[str, Any], names: _Names, above: str | None, heard: int) -> Span:
    """One interval; of one that never ended the end is the last moment that is known."""
    began, ended = row["began_ns"], row["ended_ns"]
    attributes = {f"flowledger.{name}": value for name, value in told(row, TOLD).items()}
    if ended is None:
        attributes["flowledger.never_ended"] = True
    name = row["stage"] if row["span_kind"] == "stage" and row["stage"] else row["name"]
    return Span(
        trace=names.trace(row["step"]), span=names.span(row["process"], row["id"]), parent=above, name=name, start_ns=began,
        end_ns=max(heard, began) if ended is None else ended, attributes=attributes,
    )  # fmt: skip


def _journey(path: Path, names: _Names) -> Span:
    """The way of one sample: a trace of its own with a link to each interval that had it."""
    stops = path.stops
    links = tuple(
        (names.trace(stop["step"]), names.span(stop["process"], stop["id"]),
         {f"flowledger.{name}": value for name, value in told(stop, ("stage", "rank", "mini_batch", "micro_batch")).items()})
        for stop in stops
    )  # fmt: skip
    return Span(
        trace=names.trace(f"sample {path.sample}"), span=names.root(-1), name=f"sample {path.sample}", start_ns=stops[0]["began_ns"],
        end_ns=max(stop["ended_ns"] or stop["began_ns"] for stop in stops), attributes={"flowledger.sample_id": path.sample}, links=links,
    )  # fmt: skip
