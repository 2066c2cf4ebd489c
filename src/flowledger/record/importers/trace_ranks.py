"""Whose a trace is: the rank that it tells, that its name tells, or its place among the files of an import."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowledger.record.importers.file_ranks import rank_in
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.source import Source
from flowledger.record.importers.speakers import MOST_RANKS
from flowledger.record.importers.speakers import rank_of as number

TOLD = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[\]]{0,400}?"rank"\s*:\s*(\d{1,9})\b')
# A process of a trace that several ranks' were merged into.
PROCESS = re.compile(r"(?<![a-z])(?:global[ _-]?)?rank[ _:#-]{0,2}(\d{1,9})(?!\d)|\[TP[-_]?(\d{1,6})\]", re.IGNORECASE)
NAMING = ("process_name", "process_labels")
CYCLE = re.compile(r"(?:global_?)?(?:step|iter(?:ation)?|epoch|cycle)s?[-_.=]?\d+", re.IGNORECASE)


def rank_of(about: Mapping[str, Any], source: Source, notes: Notes) -> int | None:
    """The rank of a file of which `about` are the keys beside its events."""
    rank = _told(about, source, notes)
    if rank is None:
        return _numbered(source, notes)
    before = notes.whose.setdefault(rank, _worker(source.path))
    if before != _worker(source.path):
        notes.remark(
            f"{source.path.name}: its rank is {rank}, as that of {before[1]}: of numbers that both have the first counts, intervals are those of both"
        )
    return rank


def _told(about: Mapping[str, Any], source: Source, notes: Notes) -> int | None:
    """The rank that a trace tells itself, or its name."""
    info = about.get("distributedInfo")
    said, world = (info.get("rank"), info.get("world_size")) if isinstance(info, dict) else (None, None)
    if type(world) is int and 0 < world <= MOST_RANKS:
        notes.world = max(notes.world or 0, world)
    if type(said) is int and 0 <= said < MOST_RANKS:
        return said
    return rank_in(source.path)


def rank_of_process(text: Any) -> int | None:
    """The rank that the name of a process, or its id, speaks of: `rank 3`, `[TP03] 4711`."""
    found = PROCESS.search(text) if isinstance(text, str) else None
    return number(found[1] or found[2]) if found is not None else None


def _numbered(source: Source, notes: Notes) -> int | None:
    """Where none of several files tells a rank: its place in the order of their names."""
    files = notes.files_of.get("torch_trace", ())
    if len(files) < 2:
        return None
    if any(_tells(Source(path)) for path in files):
        notes.remark(f"{source.path.name}: it does not tell whose rank it is, as others do: its rows have no rank")
        return None
    workers = list(dict.fromkeys(map(_worker, files)))
    if len(workers) < 2:
        return None
    notes.remark(
        f"none of the {len(files):,} traces says whose rank it is: they are numbered in the order of their names"
    )
    return workers.index(_worker(source.path))


def _tells(source: Source) -> bool:
    return TOLD.search(source.head) is not None or rank_in(source.path) is not None


def _worker(path: Path) -> tuple[str, str]:
    """What the traces of one process have in common: `host_pid` of `host_pid.171234.pt.trace.json`, whatever the step."""
    return CYCLE.sub("", str(path.parent)), CYCLE.sub(
        "", re.sub(r"(?:\.\d{6,})?(?:\.pt)?(?:\.trace)?\.json(?:\.gz)?$", "", path.name)
    )
