"""The verb `import`: what people already have (logs, dumps, exports, traces) as a run."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowledger.cli.options import Json

if TYPE_CHECKING:
    from flowledger.record.importers.imported import Summary

SourcesArgument = Annotated[
    list[Path],
    typer.Argument(metavar="SOURCE…", help="logs, dumps, exports, traces of one run, or directories of them"),
]
MOST_NAMES = 10
MOST_FILES = 6  # named in the summary; the others are counted
MOST_JUDGED = 2_000_000  # rows that are looked at as soon as they are there: within a gigabyte, and seconds


def import_(
    sources: SourcesArgument,
    out: Annotated[Path, typer.Option("-o", metavar="RUN", help="directory of the run that is made")],
    format: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="what the files are, where it is not seen from them")
    ] = None,
    json: Json = False,
) -> None:
    """Turn logs, dumps, exports and traces of a run into a ledger; nothing in them is ever executed.

    Exit codes: 0 a run was made, 2 nothing in the sources can be read.
    """
    from flowledger.show import plain

    summary = imported(sources, out, format=format)
    verdicts = judge(summary)
    if json:
        counted = None if verdicts is None else {verdict: len(ids) for verdict, ids in verdicts.items()}
        print(plain.as_json("import", summary.run, [], **document(summary), verdicts=counted))
    else:
        *told, where = lines(summary)
        print("\n".join([*told, f"  findings: {_counted(verdicts)}", where]))


def imported(
    sources: Sequence[Path], into: Path, *, format: str | None = None, framework: str | None = None
) -> "Summary":
    """Read files and directories of one run into a new run at `into`, for any verb that takes a log where a run is asked.

    `framework`: whose the files are, where they do not say. Raises BadInput where there is nothing to read, or `into` is taken.
    """
    from flowledger.record.importers.imported import import_into

    return import_into([Path(source) for source in sources], Path(into), form=format, framework=framework)


def judge(summary: "Summary") -> dict[str, list[str]] | None:
    """Write what the detectors find into an imported run, as a recorded one has it at its end; verdict -> ids.

    What a log cannot say is not written: nearly every check needs a recording. None where the run is too large for it.
    """
    from flowledger.diagnose.findings import findings
    from flowledger.ledger import directory
    from flowledger.ledger.reader import Ledger
    from flowledger.ledger.writer import Writer

    if sum(summary.rows.values()) > MOST_JUDGED:
        return None
    with Ledger(summary.path) as ledger:
        found = findings(ledger)
        told = ledger.rows("SELECT id, verdict FROM findings WHERE verdict <> 'skipped'")  # by the importer itself
    ink = Writer(directory.open_run(summary.path).part("driver", None, source="import"), capacity=len(found))
    for one in found:
        if one.verdict != "skipped":
            ink.put(one)
    ink.close()
    summary.lost += ink.stats().dropped
    summary.rows["findings"] = summary.rows.get("findings", 0) + ink.stats().by_table.get("findings", 0)
    said = [*((row["verdict"], row["id"]) for row in told), *((one.verdict, one.id) for one in found)]
    return {verdict: [name for its, name in said if its == verdict] for verdict in ("fail", "warn", "pass", "skipped")}


def _counted(verdicts: dict[str, list[str]] | None) -> str:
    """`1 fail (metric_not_finite); the other checks need a recorded run`."""
    if verdicts is None:
        return f"not looked for in more than {MOST_JUDGED:,} rows; flowledger diagnose does"
    bad = [(verdict, sorted(set(verdicts[verdict]))) for verdict in ("fail", "warn") if verdicts[verdict]]
    told = ", ".join(f"{len(ids)} {verdict} ({', '.join(ids[:MOST_NAMES])})" for verdict, ids in bad) or "nothing fails"
    return f"{told}; the other checks need a recorded run" if verdicts["skipped"] else told


def document(summary: "Summary") -> dict[str, Any]:
    """What an import came to, as JSON has it."""
    notes = summary.notes
    return {
        "path": str(summary.path), "framework": notes.framework, "framework_version": notes.framework_version,
        "tables": summary.rows, "formats": summary.files,
        "steps": {"first": summary.first_step, "last": summary.last_step, "count": summary.steps},
        "resumed": [{"after": last, "back_to": back} for last, back in summary.resumed],
        "repeated": summary.repeated, "skipped": notes.skipped, "skipped_at": notes.examples, "remarks": notes.remarks,
        "odd_rewards": notes.odd_rewards, "odd_rewards_at": notes.odd_at, "lost": summary.lost,
        "passed_over": notes.passed_over, "columns": notes.columns,
        "configuration": bool(notes.config), "command": notes.command,
    }  # fmt: skip


def lines(summary: "Summary") -> Iterator[str]:
    """The same for people."""
    from flowledger.record.importers.imported import odd_rewards

    notes = summary.notes
    files = sum(len(found) for found in summary.files.values())
    of = f" of {notes.framework}" if notes.framework else ""
    yield f"{summary.path}: {files} {'file' if files == 1 else 'files'}{of}, {_steps(summary)}"
    for form, found in summary.files.items():
        more = f" and {len(found) - MOST_FILES} more" if len(found) > MOST_FILES else ""
        yield f"  {form}: {', '.join(found[:MOST_FILES])}{more}"
    told = ", ".join(f"{rows:,} {table}" for table, rows in summary.rows.items())
    yield f"  rows: {told or 'none'}"
    yield from (f"  names: {said}" for said in names_said(summary))
    if notes.config:
        yield "  configuration: as the log prints it, in the manifest"
    for last, back in summary.resumed:
        yield f"  resumed: from step {last} back to step {back}; what came later counts"
    if summary.repeated:
        yield f"  said twice: {summary.repeated:,} numbers, of which the first source counts"
    yield from (f"  note: {remark}" for remark in notes.remarks)
    for reason, count in notes.skipped.items():
        yield f"  skipped {count:,}x: {reason}"
    yield from (f"    {place}" for place in notes.examples)
    if notes.odd_rewards:
        yield f"  rewards: {odd_rewards(notes)}; the samples are kept without them"
        yield from (f"    {place}" for place in notes.odd_at)
    if summary.lost:
        yield f"  lost: {summary.lost:,} rows that could not be written, so tables lack them"
    if others := notes.passed_over:
        yield f"  passed over: {len(others):,} other files, such as {', '.join(others[:MOST_FILES])}"
    yield f"look at it with: flowledger show {summary.path} metrics, or flowledger diagnose {summary.path}"


def names_said(summary: "Summary") -> Iterator[str]:
    """How many columns of tables have canonical names, which the checks look for, and the first that have none."""
    from flowledger.tables.metrics import find

    if not (columns := summary.notes.columns):
        return
    own = [raw for raw, name in columns.items() if find(name) is None]
    more = f" and {len(own) - MOST_NAMES:,} more" if len(own) > MOST_NAMES else ""
    rest = f"; the others keep their own, which no check knows: {', '.join(own[:MOST_NAMES])}{more}" if own else ""
    yield f"{len(columns) - len(own):,} of {len(columns):,} columns have canonical names{rest}"


def _steps(summary: "Summary") -> str:
    if not summary.steps:
        return "no steps"
    span = f"step {summary.first_step}" if summary.steps == 1 else f"steps {summary.first_step} to {summary.last_step}"
    return f"{span} ({summary.steps:,})" if summary.steps > 1 else span
