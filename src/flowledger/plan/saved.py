"""What a module keeps for backward and what it needs for a moment, evaluated from tables/activations*.toml.

A row of those tables: `kernels` (whose implementation: hf, te, local, …), `module` (norm, attention, mlp, moe, …),
`label`, `bytes` (an expression over symbols, local to the rank), `when` (flags that must hold; `!flag` must not),
`life` (saved: from forward to backward; forward, backward: for that instant only), `source`.
"""

import tomllib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from flowledger.plan.arithmetic import integer

LIVES = ("saved", "forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One tensor of one module in one implementation."""

    kernels: str
    module: str
    label: str
    bytes: str
    life: str = "saved"
    kind: str = "activation"
    when: tuple[str, ...] = ()
    source: str = ""

    def holds(self, flags: Set[str]) -> bool:
        return all((flag[1:] not in flags) if flag.startswith("!") else flag in flags for flag in self.when)


@dataclass(frozen=True, slots=True)
class Kept:
    """A row with its bytes, in one configuration."""

    row: Row
    bytes: int


def kept(
    kernels: str, module: str, symbols: Mapping[str, object], flags: Iterable[str], life: str = "saved"
) -> list[Kept]:
    """What this module of this implementation has alive: bytes of each tensor on this rank, empty ones left out."""
    held = frozenset(flags)
    found = [
        Kept(row, integer(row.bytes, symbols)) for row in _of(kernels, module) if row.life == life and row.holds(held)
    ]
    return [one for one in found if one.bytes > 0]


def total(rows: Iterable[Kept]) -> int:
    return sum(one.bytes for one in rows)


@cache
def _of(kernels: str, module: str) -> tuple[Row, ...]:
    """Only the tables that name these kernels are read: a plan needs one or two of them."""
    named = f'kernels = "{kernels}"'
    read = (_table(name) for name, text in _texts().items() if named in text)
    return tuple(row for table in read for row in table if row.kernels == kernels and row.module == module)


def rows() -> tuple[Row, ...]:
    """Every row of every table of activations."""
    return tuple(row for name in _texts() for row in _table(name))


@cache
def _texts() -> Mapping[str, str]:
    """Name of a table of activations -> its text."""
    found = sorted(files("flowledger.tables").iterdir(), key=lambda item: item.name)
    return {
        file.name: file.read_text(encoding="utf-8")
        for file in found
        if file.name.startswith("activations") and file.name.endswith(".toml")
    }


@cache
def _table(name: str) -> tuple[Row, ...]:
    found = []
    for raw in tomllib.loads(_texts()[name])["saved"]:
        row = Row(**{**raw, "when": tuple(raw.get("when", ()))})
        if row.life not in LIVES:
            raise AssertionError(f"{name}: {row.label}: life {row.life!r} is none of {LIVES}")
        found.append(row)
    return tuple(found)
