"""From files to a run: which are read as what, their rows written, and what was learnt of the run kept in its manifest."""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from flowledger.flow.errors import BadInput
from flowledger.ledger import directory
from flowledger.ledger.directory import RunDirectory
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.rows import FindingRow, Row
from flowledger.record.importers.configs import bindings
from flowledger.record.importers.formats import Format, format_of, named, names
from flowledger.record.importers.notes import EXAMPLES, Notes
from flowledger.record.importers.parts import MOST_ROWS, Parts, TooMany
from flowledger.record.importers.running_peaks import with_readings
from flowledger.record.importers.source import Source
from flowledger.record.importers.world import heard_of, mesh, ranks

MOST_FILES = 20_000
HEARD = "at least: those that the sources name"


@dataclass(slots=True)
class Summary:
    """What an import came to."""

    run: str
    path: Path
    rows: dict[str, int] = field(default_factory=dict)  # table -> rows
    files: dict[str, list[str]] = field(default_factory=dict)  # format -> files
    first_step: int | None = None
    last_step: int | None = None
    steps: int = 0
    resumed: list[tuple[int, int]] = field(default_factory=list)
    repeated: int = 0  # numbers that an earlier source had said already
    lost: int = 0  # rows that could not be written
    notes: Notes = field(default_factory=Notes)


def import_into(
    sources: Sequence[Path], into: Path, *, form: str | None = None, framework: str | None = None
) -> Summary:
    """Read files and directories into a new run at `into`; `framework`: whose they are, where they do not say.

    Raises BadInput where nothing in them can be read.
    """
    notes = Notes(assumed=framework)
    chosen = list(_chosen(sources, form, notes))
    if not chosen:
        raise BadInput(_nothing(sources, notes))
    book = directory.create(into, Manifest(run=into.name, level="import", framework="unknown"))
    summary = Summary(into.name, book.path, notes=notes)
    several = len({one.name for one, _ in chosen if one.metrics}) > 1
    for one, source in sorted(chosen, key=lambda each: _natural(each[1].path)):
        notes.files_of.setdefault(one.name, []).append(source.path)
    parts = Parts(book, several=several)
    crashes: list[FindingRow] = []
    try:
        for one, source in chosen:
            summary.files.setdefault(one.name, []).append(str(source.path))
            try:
                parts.put(_read(one, source, notes, crashes), one.name, ordered=one.ordered)
            except TooMany:
                notes.skip(f"what follows the first {MOST_ROWS:,} rows", source.path.name)
        if not (parts.rows or crashes or notes.config or notes.command):
            raise Nothing
        summary.resumed, summary.repeated = parts.resumed, parts.repeated
        parts.put(_told(crashes, summary, parts.steps.last), "import")
        parts.put(_said(summary, parts), "import")
        summary.rows = parts.close()
        summary.lost = parts.figures["dropped"]
    except Nothing:
        parts.stop()
        shutil.rmtree(book.path, ignore_errors=True)
        raise BadInput(_nothing(sources, notes, form)) from None
    finally:
        parts.stop()
    steps = parts.steps
    summary.first_step, summary.last_step, summary.steps = steps.first, steps.last, steps.count
    notes.ranks.update(parts.ranks, (row.rank for row in crashes if row.rank is not None))
    least = heard_of(notes.ranks, len(notes.workers), (row.message for row in crashes), notes.command)
    RunDirectory(book.path, _manifest(book.manifest, notes, least)).close(_state(crashes), parts.figures)
    return summary


def _state(crashes: Sequence[FindingRow]) -> str:
    """How the run ended, by what its sources tell: closed where they tell of no end of its own."""
    ends = [row.message for row in crashes if row.id == "crash"]
    if not ends:
        return "closed"
    return "interrupted" if all(end.startswith("KeyboardInterrupt") for end in ends) else "crashed"


class Nothing(Exception):  # noqa: N818  (told as BadInput)
    """No source has anything of use."""


def _read(one: Format, source: Source, notes: Notes, crashes: list[FindingRow]) -> Iterator[Row]:
    """The rows of a file, as far as it can be read. Crashes are kept back: another file may know that the run went on."""
    try:
        for row in with_readings(one.read(source, notes)):
            if type(row) is FindingRow and row.id == "crash":
                crashes.append(row)
            else:
                yield row
    except BadInput as error:
        notes.skip(str(error))


def _told(crashes: Sequence[FindingRow], summary: Summary, last: int | None) -> Iterator[FindingRow]:
    """The crashes; where another file has the step that one broke off, the run went on after it."""
    files = sum(len(found) for found in summary.files.values())
    for row in crashes:
        if files > 1 and row.step is not None and last is not None and last >= row.step:
            row.id, row.verdict, row.severity = "exception", "pass", "info"
            row.message = f"{row.message}; the run was started again, and went on"
        yield row


def _chosen(sources: Sequence[Path], form: str | None, notes: Notes) -> Iterator[tuple[Format, Source]]:
    """Each file with its format, those of one format together, in the order in which the formats come first."""
    asked = named(form) if form else None
    found: dict[str, list[tuple[Format, Source]]] = {}
    several = len(sources) > 1 or any(path.is_dir() for path in sources)
    for source in _files(sources):
        try:
            one = asked or format_of(source)
        except BadInput as error:
            if not several:
                raise
            if source.path in sources:
                notes.skip(str(error))
            else:
                notes.passed_over.append(str(source.inside))
            continue
        found.setdefault(one.name, []).append((one, source))
    for group in found.values():
        later = group[0][0].later
        if later is not None:
            yield from sorted(group, key=lambda one: later(one[1]))
        else:
            yield from group if group[0][0].ordered else reversed(group)  # the last checkpoint has the whole history


def _files(sources: Sequence[Path]) -> Iterator[Source]:
    """Every file of the sources. Raises BadInput for a path that is not there."""
    for path in sources:
        if _is_run(path):
            raise BadInput(
                f"{path} is a run already: nothing is to be imported; look at it with flowledger diagnose {path}"
            )
        if path.is_dir():
            inside = sorted(_walk(path), key=_natural)
            if len(inside) > MOST_FILES:
                raise BadInput(f"{path} holds {len(inside):,} files, more than {MOST_FILES:,}; name the ones to import")
            yield from (Source(file, file.relative_to(path)) for file in inside)
        elif path.exists() and not path.is_file():
            raise BadInput(f"{path} is no regular file; write what comes out of it to a file first")
        elif path.exists():
            yield Source(path, Path(path.name))
        else:
            raise BadInput(f"{path}: no such file or directory")


def _is_run(path: Path) -> bool:
    try:
        return (path / directory.MANIFEST).is_file() and bool(directory.open_run(path))
    except BadInput:
        return False


def _walk(directory: Path) -> Iterator[Path]:
    for place, inner, here in os.walk(directory):  # follows no links, so that no circle is walked
        inner[:] = [name for name in inner if not name.startswith(".")]
        files = (Path(place) / name for name in here if not name.startswith("."))
        yield from (file for file in files if file.is_file())


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts step_9 before step_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]{1,18})", str(path))]


def _said(summary: Summary, parts: Parts) -> Iterator[FindingRow]:
    """What was skipped, and where the run was resumed, as findings."""
    notes = summary.notes
    if notes.skipped:
        total = sum(notes.skipped.values())
        reasons = "; ".join(f"{reason} ({count:,}x)" for reason, count in list(notes.skipped.items())[:EXAMPLES])
        yield FindingRow(
            id="import_skipped", verdict="skipped", order="import",
            message=f"{total:,} places of the sources could not be read: {reasons}",
            evidence=notes.examples, needs=["these places in a readable form"],
        )  # fmt: skip
    if notes.odd_rewards:
        yield FindingRow(
            id="rewards_not_numbers", verdict="fail" if {"nan", "inf", "-inf"} & notes.odd_rewards.keys() else "warn",
            severity="error", order="import", message=odd_rewards(notes), evidence=notes.odd_at,
            next_step="see what the reward function returns for these samples; a reward that is nan or infinite makes the advantages of its group so too",
        )  # fmt: skip
    for last, back in summary.resumed:
        yield FindingRow(
            id="import_resumed", verdict="pass", order="import", step=back,
            message=f"after step {last} the run went back to step {back}: it was resumed there, and what came later counts",
        )  # fmt: skip
    if notes.remarks:
        yield FindingRow(
            id="import_remarks",
            verdict="pass",
            order="import",
            message="; ".join(notes.remarks),
            evidence=notes.remarks,
        )


def odd_rewards(notes: Notes) -> str:
    """How many rewards are no finite numbers, and what they are; such a sample is kept without a reward."""
    kinds = ", ".join(f"{count:,} {what}" for what, count in notes.odd_rewards.items())
    count = sum(notes.odd_rewards.values())
    return f"{count:,} reward{'s are' if count != 1 else ' is'} told and no finite number{'s' if count != 1 else ''} ({kinds})"


def _manifest(opened: Manifest, notes: Notes, least: int) -> Manifest:
    """The manifest with what was learnt; `least`: so many ranks were heard of."""
    config: dict[str, Any] = {"raw": notes.config} if notes.config else {}
    if notes.command:
        config["command"] = notes.command
    many = ranks(notes.framework, notes.config, notes.command, notes.world)
    return msgspec.structs.replace(
        opened, config=config, framework=notes.framework or "unknown", framework_version=notes.framework_version,
        hardware={}, bindings=bindings(notes.framework, notes.config), ranks=many or least, mesh=mesh(notes.framework, notes.config, many),
        sources={} if many or not least else {"ranks": HEARD},
    )  # fmt: skip


def _nothing(sources: Sequence[Path], notes: Notes, form: str | None = None) -> str:
    where = ", ".join(map(str, sources)) or "no source"
    if notes.skipped:
        reason = next(iter(notes.skipped))
        return (
            reason if any(str(path) in reason for path in sources) else f"nothing in {where} can be imported: {reason}"
        )
    if others := notes.passed_over:
        more = f" and {len(others) - EXAMPLES:,} more" if len(others) > EXAMPLES else ""
        return (
            f"nothing in {where} says anything of a training ({', '.join(others[:EXAMPLES])}{more}): no step, reading of memory, "
            f"sample, configuration or crash; what can be read: {names()}"
        )
    if form is not None:
        return f"nothing in {where} can be read as {form}; leave --format out, or name another: {names()}"
    return f"{where} holds no file; name a log, a dump, an export, or a directory of them"
