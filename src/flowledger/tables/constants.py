"""Constants that no configuration states: workspaces, contexts, allocator behaviour. Rows of `constants*.toml`.

Each has a unit, the source it was read or measured in, the version it holds for, and its physical reason. `constant`
gives the value; `perturbed` scales some for as long as it is entered (a test asks what each of them moves).
"""

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_scales: dict[str, float] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One figure that had to be measured or read, and cannot be derived."""

    name: str
    value: float
    unit: str  # bytes, bytes/element, ratio, count
    reason: str  # why it exists, physically
    source: str
    version: str  # of what it was read or measured in
    date: str


def constant(name: str) -> float:
    """The value of a constant. Raises KeyError for a name that no table has: a fault of the caller."""
    return constants()[name].value * _scales.get(name, 1.0)


@cache
def constants() -> Mapping[str, Constant]:
    """Every constant by name."""
    found: dict[str, Constant] = {}
    for file in sorted(files("flowledger.tables").iterdir(), key=lambda item: item.name):
        if file.name.startswith("constants") and file.name.endswith(".toml"):
            for raw in tomllib.loads(file.read_text(encoding="utf-8"))["constant"]:
                row = Constant(**{**raw, "value": float(raw["value"])})
                if row.name in found:
                    raise AssertionError(f"{file.name}: {row.name} stands twice")
                found[row.name] = row
    return found


@contextmanager
def perturbed(scales: Mapping[str, float]) -> Iterator[None]:
    """Constants multiplied by these factors while inside."""
    _scales.update(scales)
    try:
        yield
    finally:
        for name in scales:
            _scales.pop(name, None)
