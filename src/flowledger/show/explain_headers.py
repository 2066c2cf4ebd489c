"""What the columns of tables are, by their headings: rows of `headers.toml`."""

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from flowledger.flow.errors import folded
from flowledger.show.languages import Language


def facts(word: str, lang: Language) -> Iterator[tuple[str, dict[str, Any]]]:
    """What stands under a heading, with its sort."""
    name = _headings().get(_spelt(word))
    if name is not None:
        yield "heading", {"what": "heading", "name": name, "asked": word, "meaning": _rows()[name][lang]}


def words() -> Iterator[str]:
    """Every heading that is understood here."""
    for name, row in _rows().items():
        yield from (name, *row.get("names", ()))


@cache
def _rows() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(files("flowledger.show").joinpath("headers.toml").read_text(encoding="utf-8"))


@cache
def _headings() -> Mapping[str, str]:
    """Heading, or column of the ledger, as it is looked up -> the row that explains it."""
    rows = _rows()
    others = {_spelt(other): name for name, row in rows.items() for other in row.get("names", ())}
    return others | {_spelt(name): name for name in rows}


def _spelt(word: str) -> str:
    return folded(word).replace(" ", "_").replace("-", "_")
