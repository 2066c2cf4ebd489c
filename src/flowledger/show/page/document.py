"""The page as data: what every view shows, and what there is to choose from. JSON, with nothing of how it is drawn."""

import re
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any

from flowledger import __version__
from flowledger.flow.errors import BadInput
from flowledger.show.page.book import Book, text
from flowledger.show.page.choice import Choice
from flowledger.show.page.views import VIEWS, View
from flowledger.show.words import SAID_TOO_LARGE, TOO_LARGE

SCHEMA = 1
AT_ONCE = 3  # views: one of them waits for the metrics
MOST_TOLD = 300  # letters of an error


def document(book: Book, lang: str = "en", *, live: bool = False) -> dict[str, Any]:
    """Everything that a page shows. `live`: only what each view shows first; the rest is asked for when it is looked at."""
    return {
        "schema": SCHEMA,
        "lang": lang,
        "live": live,
        "about": about(book),
        "words": words(),
        "views": _views(book, live=live),
    }


def _views(book: Book, *, live: bool) -> dict[str, Any]:
    """View by view; while the database works for one, another is put together."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        made = pool.map(lambda view: whole(view, book, live=live), VIEWS)
        return dict(zip((view.name for view in VIEWS), made, strict=True))


def whole(view: View, book: Book, *, live: bool) -> dict[str, Any]:
    """One view: `first` and `at`, key of a choice -> its data."""
    try:
        choices = [*view.choices(book)] or [Choice()]
    except Exception as error:  # noqa: BLE001  as below
        return {"first": "", "at": {"": not_shown(f"{type(error).__name__}: {error}")}}
    held = choices[:1] if live else choices
    return {"first": choices[0].key, "at": {one.key: data(view, book, one) for one in held}}


def data(view: View, book: Book, at: Choice) -> dict[str, Any]:
    """What the view shows of a choice; where the ledger cannot be read for it, that."""
    try:
        return view.data(book, at)
    except BadInput as error:
        return not_shown(str(error))
    except Exception as error:  # noqa: BLE001  whatever a ledger holds, the other views are drawn
        return not_shown(f"{type(error).__name__}: {error}")


def not_shown(why: str) -> dict[str, Any]:
    """What is there instead of a view's data. What the database says of its own is put in words."""
    told = next((words for pattern, words in IN_WORDS if pattern.search(why)), text(why[:MOST_TOLD], why[:MOST_TOLD]))
    return {"absent": True, "missing": [text(f"This cannot be shown: {told['en']}", f"无法显示：{told['zh']}")]}


# What the database says where rows are beyond it, in words; the first that is met.
IN_WORDS = (
    (TOO_LARGE, text(*SAID_TOO_LARGE)),
    (re.compile(r"^(\w+: )?Out of Memory Error"), text("its rows do not fit into the memory of this machine", "其数据行放不进本机内存")),
    (
        re.compile(r"^(\w+: )?([A-Z][a-z]+ )+Error: "),
        text("its rows do not fit together; `flowledger sql RUN` reads them one table at a time", "其数据行无法合并；可用 `flowledger sql RUN` 逐表查看"),
    ),
)  # fmt: skip


def about(book: Book) -> dict[str, Any]:
    """What the page is of."""
    manifest = book.ledger.directory.manifest
    return {
        "run": book.ledger.run,
        "state": book.ledger.directory.state,
        "sources": sorted(book.sources() | ({"plan"} if book.planned else set())),
        "framework": manifest.framework,
        "framework_version": manifest.framework_version,
        "mesh": book.ledger.mesh,
        "level": manifest.level,
        "created": manifest.created,
        "torn": book.ledger.torn,
        "made_by": f"flowledger {__version__}",
    }


def words() -> dict[str, Any]:
    """The page's own words, in both languages."""
    return tomllib.loads(files("flowledger.show.page").joinpath("words.toml").read_text(encoding="utf-8"))
