"""What a file is, as its first bytes and keys tell, and why one cannot be read."""

import json
import os
import re
import select
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowledger.flow.errors import BadInput, nearest

if TYPE_CHECKING:
    from flowledger.ledger.reader import Ledger

REPORT_KEYS = frozenset({"symptom", "measured"})  # of what somebody reports, as JSON or YAML
READ = 1 << 16  # bytes that tell what a file is
SHORT = 1 << 20  # bytes of a text that somebody may have written by hand
# Endings of what is a file of the job and says nothing of how it ran -> what it is, and what to give in its place.
NOT_READ = {
    ".py": "a Python script, which is neither run nor read: give the script that launches it (.sh), a YAML file of its settings, or "
    "the log that it printed",
    ".ipynb": "a notebook, which is neither run nor read: give the log that it printed, as text",
    ".html": "a web page, such as flowledger draws of a run, is not read: give the run's directory, or the log itself",
    ".css": "the style of a web page is not read: give a run, a log, a configuration, a traceback or a report",
    ".js": "the program of a web page is not read: give a run, a log, a configuration, a traceback or a report",
}
NOT_READ[".htm"] = NOT_READ[".html"]
JSON_BEGINS = re.compile(rb'(?:\[\s*)*\{\s*"|\[\s*[\[{"]')
PATIENCE_S = 10  # with a pipe
LARGEST = 64 << 20  # bytes of a JSON document that is read whole


def said(error: Exception) -> str:
    """Why a source is left out. What no reader has foreseen is named by its type: the other sources go on."""
    if isinstance(error, BadInput):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"cannot be read ({type(error).__name__}: {str(error)[:160]})"


def path_of(words: str, *, otherwise: Path) -> Path:
    """The file that words may name; `otherwise` for words that no file can have as its name, such as a pasted line."""
    try:
        path = Path(words).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError):
        return otherwise
    return path


def check_framework(name: str | None) -> None:
    """Raises BadInput for a framework that nothing here knows, with the nearest."""
    from flowledger.config.detect import FRAMEWORKS

    if name is not None and name not in FRAMEWORKS:
        raise BadInput(f"--framework {name!r} is none of {', '.join(FRAMEWORKS)}{nearest(name, FRAMEWORKS)}")


def drained(pipe: Path, into: Path) -> Path:
    """What comes out of a pipe, as a file. Raises BadInput where nobody writes into it."""
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # else this would wait for somebody to write
    with os.fdopen(descriptor, "rb") as source, into.open("wb") as file:
        if not select.select([source], [], [], PATIENCE_S)[0]:
            raise BadInput(f"a pipe into which nobody has written for {PATIENCE_S} s")
        os.set_blocking(descriptor, True)
        shutil.copyfileobj(source, file)
    return into


def is_report(path: Path) -> bool:
    """Whether a file is a report as JSON or YAML: it has keys that no configuration has."""
    with path.open("rb") as file:
        head = file.read(READ).decode("utf-8", "replace")
    first = head.splitlines()[0] if head.splitlines() else ""
    keys = set(re.findall(r'"(\w+)"\s*:', first if path.suffix == ".jsonl" else head))
    keys |= set(re.findall(r"(?m)^(\w+):", head)) if path.suffix in (".yaml", ".yml") else set()
    return bool(keys & REPORT_KEYS)


def json_object(path: Path) -> Mapping[str, Any] | None:
    """The object that a JSON file holds, where it holds one and is small enough to be a document."""
    if path.stat().st_size > LARGEST:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError):
        return None
    return found if isinstance(found, dict) else None


def broken_json(path: Path) -> str | None:
    """Why a file that is JSON by its name or its first signs holds none; None for any other file, and for JSON that is whole.

    Half a document reads like prose, and would be answered as somebody's words.
    """
    with path.open("rb") as file:
        head = file.read(READ).lstrip(b"\xef\xbb\xbf \t\r\n")
    if path.suffix not in (".json", ".jsonl") and not JSON_BEGINS.match(head):
        return None
    if path.stat().st_size > LARGEST:
        return "JSON in which nothing is known"
    try:
        json.loads(path.read_bytes())
    except RecursionError:
        return "JSON that is nested too deep to be read"
    except ValueError as error:
        place = f"line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else "its bytes"
        return f"JSON that is not whole: it breaks off at {place}"
    return None


def is_short_text(path: Path) -> bool:
    """Whether a file may be something that was written by hand: short, without a zero byte, and no table or dump."""
    if not path.is_file() or path.suffix not in ("", ".txt", ".md", ".log") or path.stat().st_size > SHORT:
        return False
    with path.open("rb") as file:
        return b"\0" not in file.read(READ)


def after_the_end(ledger: "Ledger") -> Iterator[str]:
    """What was raised once the training had come to its end: no step failed, and it should not go unsaid."""
    for row in ledger.rows(
        "SELECT message FROM findings WHERE id = 'exception' AND message LIKE '%; the training had come to its end' LIMIT 3"
    ):
        yield f"after the last step, an exception: {row['message'].partition('; the training had')[0]}"


def holds_something(summary: Any) -> bool:
    """Whether an import came to anything: rows, a configuration, or a finding that says more than what was left out."""
    from flowledger.ledger.reader import Ledger

    if summary.notes.config or any(count for table, count in summary.rows.items() if table != "findings"):
        return True
    with Ledger(summary.path, only=("findings",)) as ledger:
        return bool(ledger.rows("SELECT 1 FROM findings WHERE verdict <> 'skipped' LIMIT 1"))
