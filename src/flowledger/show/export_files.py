"""Where exports go: one file, whole or not at all, or a directory of files that is ours. What cannot be written is one clear line."""

import gzip
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from flowledger.flow.errors import BadInput

MARK = "export.json"  # in a directory of ours: what it is an export of, and which files are
LEVEL = 6  # of gzip


@contextmanager
def written(out: Path | None) -> Iterator[BinaryIO]:
    """A file to write to, there under its name once all is written; `.gz` is compressed, None is standard output.

    Raises BadInput where it cannot be written; then nothing is left behind and what was there before stands.
    """
    if out is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if out.is_dir():
        raise BadInput(f"cannot write {out}: it is a directory, and this form is one file; name one with -o {out}/FILE")
    aside = out if out.exists() and not out.is_file() else out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("wb") as raw:
                if out.suffix == ".gz":
                    with gzip.GzipFile("", "wb", LEVEL, raw, mtime=0) as packed:
                        yield cast("BinaryIO", packed)
                else:
                    yield raw
            if aside is not out:
                aside.replace(out)
        except BaseException:
            if aside is not out:
                aside.unlink(missing_ok=True)
            raise
    except BrokenPipeError:
        raise
    except OSError as error:
        raise refused(out, error) from None


def refused(out: Path, error: OSError) -> BadInput:
    """What is said of a place that cannot be written."""
    return BadInput(f"cannot write {out}: {error.strerror or error}; choose another place with -o")


def directory(out: Path | None, form: str) -> Path:
    """An empty directory at `out`: a new one, or one of ours, whose files are removed first.

    Raises BadInput where there is something else, or nothing can be written.
    """
    if out is None:
        raise BadInput(f"--to {form} writes several files: name a directory for them with -o DIR")
    try:
        if out.exists() and not out.is_dir():
            raise BadInput(f"{out} is a file, and --to {form} needs a directory; choose another place with -o")
        if out.is_dir() and any(out.iterdir()):
            ours = _ours(out)
            if strangers := sorted(
                {str(path.relative_to(out)) for path in out.rglob("*") if not path.is_dir()} - ours - {MARK}
            ):
                raise _foreign(out, strangers[0])
            for name in ours:
                (out / name).unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        mark(out, form, "", [])  # what cannot be written is said before anything is read
    except OSError as error:
        raise refused(out, error) from None
    return out


def mark(out: Path, form: str, run: str, files: Sequence[str]) -> None:
    """Note in a directory what it is. Raises OSError."""
    told = {"form": form, "run": run, "files": list(files)}
    (out / MARK).write_text(json.dumps(told, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _ours(out: Path) -> set[str]:
    """The files of an export that stands there. Raises BadInput where it is none."""
    try:
        told = json.loads((out / MARK).read_text(encoding="utf-8"))
        return {
            str(name)
            for name in told["files"]
            if ".." not in Path(str(name)).parts and not Path(str(name)).is_absolute()
        }
    except (OSError, ValueError, TypeError, KeyError):
        raise _foreign(out, min(path.name for path in out.iterdir())) from None


def _foreign(out: Path, name: str) -> BadInput:
    return BadInput(
        f"{out} is not empty and not all of it is an export of ours ({name}): nothing there is overwritten; choose another place with -o"
    )
