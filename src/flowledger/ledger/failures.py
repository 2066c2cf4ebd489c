"""Why a part stopped being written: kept beside its rows, in a name alone where the disk takes no more."""

import errno
import os
from contextlib import suppress
from pathlib import Path

PREFIX = "failed-"  # and the error's name: an empty file says it still


def keep(part: Path, error: OSError) -> None:
    """Leave the error in the part; what cannot be written there either is let go."""
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    with suppress(OSError):
        (part / f"{PREFIX}{name}").write_text(error.strerror or str(error), encoding="utf-8")


def kept(run: Path) -> dict[str, str]:
    """Part -> why it ends where it does, of those that could say it."""
    found = [*run.glob(f"parts/*/{PREFIX}*"), *run.glob(f"compacted/*/{PREFIX}*")]
    return {file.parent.name: _text(file) for file in sorted(found)}


def _text(file: Path) -> str:
    name = file.name.removeprefix(PREFIX)
    with suppress(OSError):
        if text := file.read_text(encoding="utf-8", errors="replace").strip():
            return text
    known = {code: number for number, code in errno.errorcode.items()}
    return os.strerror(known[name]) if name in known else name
