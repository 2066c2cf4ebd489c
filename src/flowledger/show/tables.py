"""The tables that `show` prints, as data: which view, which columns, what they are called. No drawing here.

A table's rows carry the ledger's own column names, so that JSON, CSV and terminal say the same.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from flowledger.flow.errors import BadInput, nearest
from flowledger.flow.stages import stage as known_stage
from flowledger.ledger.reader import Ledger
from flowledger.show.allocator import most_reserved
from flowledger.show.columns import Column, Rows, Table
from flowledger.show.estimates import estimates
from flowledger.show.shortage import shortages


@dataclass(frozen=True, slots=True)
class Spec:
    """Where a table comes from. `{step}` in the view is the step asked for, or NULL."""

    view: str
    columns: tuple[Column, ...]
    section: str | None = None
    has_step: bool = True
    has_stage: bool = True
    has_phase: bool = False
    whole: str = ""  # the same of all steps, where there is a view of that, which may have been worked out


LONGEST_WAITS = 3

_KINDS = ("param", "grad", "optimizer", "activation", "kv_cache", "comm_buffer", "temporary", "batch", "residue")
_SHORT = {
    "optimizer": "optim",
    "activation": "activ",
    "kv_cache": "kv",
    "comm_buffer": "comm",
    "temporary": "temp",
    "residue": "resid",
}

# shapes has the eight columns of a shape ledger, log the thirteen fields of a record.
TABLES: dict[str, Spec] = {
    "shapes": Spec(
        "SELECT *, place(stage, phase) AS place FROM shapes_at({step})",
        (
            Column("stage"), Column("tensor_name", "tensor"), Column("logical_shape", form="shape"),
            Column("local_shape", "local shard shape", "shape"), Column("mask", "mask / broadcast"),
            Column("owner_rank"),
            Column("lifetime"), Column("common_bug"),
            Column("phase", wide=True), Column("role", wide=True), Column("dims", wide=True),
            Column("broadcast", wide=True),
            Column("access", wide=True), Column("mask_shape", form="shape", wide=True),
            Column("mask_fits", form="flag", wide=True), Column("mask_ratio", form="percent", wide=True),
            Column("padding", wide=True), Column("kind", wide=True), Column("dtype", wide=True),
            Column("bytes", form="bytes", wide=True), Column("logical_shape_min", wide=True),
            Column("local_shape_min", wide=True),
            Column("mask_shape_min", wide=True), Column("owner", wide=True), Column("layers", form="count", wide=True),
            Column("ranks", form="count", wide=True), Column("accesses", form="count", wide=True),
            Column("common_bug_zh", wide=True),
        ),
        section="place", has_step=False, has_phase=True, whole="SELECT *, place(stage, phase) AS place FROM shapes",
    ),
    "memory": Spec(
        "FROM memory_by_stage",
        (
            Column("step", form="count"), Column("stage"), Column("instant", "at"), Column("rank", form="count", wide=True),
            *(Column(kind, _SHORT.get(kind, kind), "bytes") for kind in _KINDS),
            Column("known", "live", "bytes"), Column("allocated", "alloc", "bytes"), Column("reserved", "resv", "bytes"),
            Column("fragmentation", "frag", "percent"),
            Column("phase", wide=True),
            Column("micro_batch", form="count", wide=True),
            Column("peak_since_stage", "peak", "bytes", wide=True), Column("device_used", form="bytes", wide=True),
            Column("host_used", form="bytes", wide=True), Column("limit", form="bytes", wide=True),
        ),
        section="step", has_phase=True,
    ),
    "lifetimes": Spec(
        "FROM lifetimes_at({step})",
        (
            Column("born_at", "made in"), Column("tensor_name", "tensor"), Column("readers", "read by"),
            Column("freed_at", "freed in"),
            Column("declared_freed_by", "needed until"), Column("lifetime"), Column("bytes", "largest", "bytes"),
            Column("storages", "times", "count"), Column("outlives", form="flag"), Column("holder"),
            Column("last_read_at", "last read", wide=True), Column("kind", wide=True), Column("role", wide=True),
            Column("total_bytes", form="bytes", wide=True), Column("alive_ms", "alive", "milliseconds", wide=True),
            Column("first_step", form="count", wide=True), Column("last_step", form="count", wide=True),
        ),
        section="born_at", has_step=False, has_stage=False,
    ),
    "stages": Spec(
        "FROM stages",
        (
            Column("step", form="count"), Column("stage"), Column("seconds", "time", "seconds"),
            Column("share", form="percent"), Column("slowest_rank", "slowest rank", "count", sparse=True),
            Column("waited_seconds", "waited", "seconds", sparse=True),
            Column("tokens_logical", "logical tokens", "count"), Column("tokens_valid", "valid", "count"),
            Column("tokens_computed", "computed", "count"), Column("tokens_per_s", "valid/s", "count"),
            Column("peak_bytes", "peak", "bytes"), Column("role", wide=True), Column("calls", form="count", wide=True),
            Column("open_calls", "never ended", "count", wide=True),
        ),
        section="step",
    ),
    "balance": Spec(
        "FROM balance_at({step})",
        (
            Column("step", form="count"), Column("stage"), Column("rank", form="count"),
            Column("samples", form="count"), Column("tokens", form="count"),
            Column("length_squares", "Σlen²", "count"), Column("longest", form="count"),
            Column("micro_batches", "micro-batches", "count"), Column("seconds", "time", "seconds"),
            Column("comm_seconds", "in collectives", "seconds"), Column("waited_seconds", "waited", "seconds"),
            Column("waited_for", "for rank", "count"), Column("process", wide=True),
        ),
        section="step", has_step=False,
    ),
    "metrics": Spec(
        "FROM metrics_by_step",
        (
            Column("step", form="count"), Column("name"), Column("value", form="number"), Column("special"),
            Column("recomputed_value", "recomputed", "number"), Column("differs", form="flag"),
            Column("raw_name", wide=True), Column("recomputed", form="flag", wide=True),
        ),
        section="step", has_stage=False,
    ),
    "samples": Spec(
        "FROM samples_merged",
        (
            Column("step", form="count"), Column("group_id", "group"), Column("sample_id", "sample"),
            Column("prompt_length", "prompt", "count"), Column("response_length", "response", "count"),
            Column("finish_reason", "finish"), Column("reward", form="number"), Column("advantage", form="number"),
            Column("trained", form="trained"), Column("dropped_reason", "dropped"),
            Column("rewards", form="map", wide=True),
            Column("versions", wide=True), Column("attempt", form="count", wide=True),
        ),
        section="step", has_stage=False,
    ),
    "log": Spec(
        "FROM log_rows ORDER BY process, t_ns, seq",
        (
            Column("stage"), Column("rank", form="count"), Column("tensor_name"), Column("logical_shape", form="shape"),
            Column("local_shape", form="shape"), Column("dtype"), Column("numel", form="count"),
            Column("bytes", form="bytes"),
            Column("mask_ratio", form="percent"), Column("lifetime"), Column("comm_type"),
            Column("latency_ms", form="milliseconds"), Column("owner"),
        ),
    ),
    "findings": Spec(
        "FROM findings_view",
        (
            Column("verdict"), Column("id"), Column("message"), Column("next_step", sparse=True),
            Column("needs", sparse=True), Column("stage", wide=True), Column("step", form="count", wide=True),
            Column("severity", wide=True), Column("order", wide=True), Column("position", form="count", wide=True),
            Column("scope", wide=True), Column("evidence", wide=True), Column("fix", form="map", wide=True),
            Column("confidence", form="number", wide=True),
        ),
    ),
}  # fmt: skip


def table(ledger: Ledger, name: str, *, step: int | None = None, stage: str | None = None) -> Table:
    """One table of a run. Raises BadInput for an unknown table or stage, or a step that the run does not have."""
    if name not in TABLES:
        known = (*TABLES, "mesh")  # which `show.mesh` makes
        raise BadInput(f"no table is called {name!r}; there are {', '.join(known)}{nearest(name, known)}")
    spec = TABLES[name]
    place = _place(name, spec, stage)
    if step is not None:
        check_step(ledger, step)
    rows = _shown_source(ledger.rows(*_query(spec, step, place)))
    columns = spec.columns
    if name == "shapes":
        _held_by(ledger, rows)
    if name == "memory":
        rows = _rank_by_rank(rows)
        several = len({row["rank"] for row in rows}) > 1
        columns = tuple(replace(one, wide=one.wide and not (several and one.name == "rank")) for one in columns)
    summary = _SUMMARIES[name](ledger, step, place[0]) if name in _SUMMARIES else {}
    return Table(name, ledger.run, columns, rows, spec.section, summary)


def beside(table: Table, made: Mapping[str, Mapping[int, float]], apart: Collection[tuple[int, str]]) -> Table:
    """Metrics as they were told with what the rows of the run give beside them, and those that it alone gives.

    made: metric -> step -> number; apart: (step, metric) where the two are not the same.
    """
    left = {(step, name): number for name, steps in made.items() for step, number in steps.items()}
    rows = []
    for row in table.rows:
        place = (row["step"], row["name"])
        rows.append({**row, "recomputed_value": left.pop(place, None), "differs": place in apart})
    rows += [
        {"step": step, "name": name, "value": None, "special": None, "recomputed_value": number, "differs": False}
        for (step, name), number in left.items()
    ]
    return replace(table, rows=sorted(rows, key=lambda row: (row["step"] is None, row["step"] or 0, row["name"])))


def _place(name: str, spec: Spec, stage: str | None) -> tuple[str | None, str | None]:
    """Stage and phase of `update_actor/forward`. Raises BadInput for those that there are not, or not in this table."""
    if stage is None:
        return None, None
    of, slash, phase = stage.partition("/")
    known = known_stage(of)
    if not spec.has_stage:
        raise BadInput(f"--stage does not apply to {name}: its rows span stages; leave it out")
    if not slash:
        return of, None
    if phase not in known.phases:
        there = f"it has {', '.join(known.phases)}" if known.phases else "it has none"
        raise BadInput(f"--stage {stage}: {of} has no phase {phase!r}; {there}{nearest(phase, known.phases)}")
    if not spec.has_phase:
        raise BadInput(f"--stage {stage}: {name} has whole stages only; use --stage {of}")
    return of, phase


def _held_by(ledger: Ledger, rows: Rows) -> None:
    """How many ranks hold each tensor; of one that comes layer by layer, a layer. A plan has a row for the first rank of a class."""
    key = ("source", "stage", "phase", "tensor_name", "dims", "owner_rank")
    named = ", ".join(key)
    seen = ledger.rows(
        f"WITH classes AS (SELECT {named}, layer, rank, max(CASE source WHEN 'plan' THEN rank_count ELSE 1 END) AS ranks "
        f"FROM accesses GROUP BY ALL), layers AS (SELECT {named}, layer, sum(ranks) AS ranks FROM classes GROUP BY ALL) "
        f"SELECT {named}, min(ranks) AS ranks FROM layers GROUP BY ALL"
    )  # fmt: skip
    held = {tuple(row[name] for name in key): int(row["ranks"] or 0) for row in seen}
    for row in rows:
        row["held_by"] = held.get(tuple(row[name] for name in key))


def _rank_by_rank(rows: Rows) -> Rows:
    """The readings of one instant side by side, a rank after another: the view has them by time."""
    instants = ("begin", "peak", "end")

    def order(row: dict[str, Any]) -> tuple[int, int]:
        return instants.index(row["instant"]) if row["instant"] in instants else 1, -1 if row["rank"] is None else row[
            "rank"
        ]

    places = groupby(rows, key=lambda row: (row["step"], row["stage"], row["phase"]))
    return [row for _, beside in places for row in sorted(beside, key=order)]


def _query(spec: Spec, step: int | None, place: tuple[str | None, str | None]) -> tuple[str, list[Any]]:
    whole = spec.whole if step is None else ""
    view = whole or spec.view.format(step="NULL" if step is None else int(step))
    conditions = {"step = ?": step if spec.has_step else None, "stage = ?": place[0], "phase = ?": place[1]}
    used = {text: value for text, value in conditions.items() if value is not None}
    where = f" WHERE {' AND '.join(used)}" if used else ""
    return f"FROM ({view}){where}", list(used.values())


def _shown_source(rows: Rows) -> Rows:
    """What happened, where something did; otherwise what was planned."""
    seen = [row for row in rows if row["source"] != "plan"]
    return seen or rows


def check_step(ledger: Ledger, step: int) -> None:
    """Raise BadInput, with the steps that there are, where a run has no such step."""
    tables = " UNION ".join(f"SELECT step FROM {name}" for name in ("spans", "metrics", "tensors", "memory", "samples"))
    found = [row["step"] for row in ledger.rows(f"FROM ({tables}) WHERE step IS NOT NULL ORDER BY step")]
    if step not in found:
        there = f"it has steps {found[0]} to {found[-1]}" if found else "it has no steps yet"
        raise BadInput(f"run {ledger.run} has no step {step}; {there}")


def _memory_summary(ledger: Ledger, step: int | None, _stage: str | None) -> dict[str, Any]:
    """The run's highest peak with what it was made of, and the rough estimates beside what was measured."""
    peaks = _shown_source(ledger.rows("FROM peaks WHERE ?::BIGINT IS NULL OR step = ?", [step, step]))
    if not peaks:
        return {}
    highest = max(peaks, key=lambda row: (row["instant"] == "peak", row["peak"], row["known"] is not None))
    held = "FROM memory_readings WHERE source <> 'plan' AND reserved IS NOT NULL AND (?::BIGINT IS NULL OR step = ?)"
    most = ledger.rows(
        f"{held} QUALIFY reserved = max(reserved) OVER () ORDER BY t_ns, process, stage, phase, instant", [step, step]
    )  # only these can be the one
    counted = ledger.rows(  # by a device's own counters, which miss nothing between two readings
        "FROM memory_readings WHERE source <> 'plan' AND reserved_peak_since_stage IS NOT NULL AND stage IS NOT NULL "
        "AND (?::BIGINT IS NULL OR step = ?) ORDER BY peak_since_stage DESC, t_ns, process, stage, phase, instant LIMIT 1",
        [step, step],
    )
    return {
        "peak": highest,
        "counted": counted[0] if counted else None,
        "allocator": most_reserved(most)
        or min(most, key=lambda row: row["step"] or 0, default=None),  # where a framework tells its peak alone
        "shortages": shortages(ledger, step),
        "estimates": [] if highest["source"] == "plan" else estimates(ledger, highest, step=step),
    }


def _balance_summary(ledger: Ledger, step: int | None, stage: str | None) -> dict[str, Any]:
    """The longest waits: who waited in which collective, for which rank, and where that one was. `seconds`: of the rank that waited most."""
    waits = ledger.rows(
        'WITH mine AS (SELECT step, stage, comm_type, "group", last_rank, last_stage, rank, sum(seconds) AS seconds '
        "FROM waited WHERE (?::BIGINT IS NULL OR step = ?) AND (?::VARCHAR IS NULL OR ? IN (stage, last_stage)) GROUP BY ALL) "
        "SELECT * EXCLUDE (rank, seconds), list(rank ORDER BY rank) AS ranks, max(seconds) AS seconds "
        f'FROM mine GROUP BY ALL ORDER BY seconds DESC, step, last_rank, stage, last_stage, comm_type, "group" LIMIT {LONGEST_WAITS}',
        [step, step, stage, stage],
    )
    return {"waits": waits} if waits else {}


_SUMMARIES: dict[str, Callable[[Ledger, int | None, str | None], dict[str, Any]]] = {
    "memory": _memory_summary,
    "balance": _balance_summary,
}
