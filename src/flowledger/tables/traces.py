"""What the names in a profiler's trace mean: collectives, stages, sizes of element types. The rows of `traces.toml`."""

import re
import tomllib
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any


@lru_cache(maxsize=8192)
def collective(name: str) -> str | None:
    """The kind of communication that a kernel or annotation does: empty where only that it communicates is known."""
    return next((kind for pattern, kind in _patterns("collective", "comm_type") if pattern.match(name)), None)


@lru_cache(maxsize=8192)
def stage(name: str) -> str | None:
    """The stage that people mean by an annotation of this name."""
    own = name.rpartition("::")[2].strip()
    return next((stage for pattern, stage in _patterns("annotation", "stage") if pattern.fullmatch(own)), None)


def dtype_bytes(name: str) -> int | None:
    """Bytes of an element of one of c10's types."""
    size: int | None = _table()["dtype_bytes"].get(name)
    return size


@cache
def _patterns(rows: str, says: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(row["pattern"], re.IGNORECASE), row[says]) for row in _table()[rows])


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("flowledger.tables").joinpath("traces.toml").read_text(encoding="utf-8"))
