"""The tokens of one sample as a table for a terminal: what says nothing stands beneath, and no number is ever cut."""

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from flowledger.show.token_columns import legend
from flowledger.show.words import ABSENT, visible, written

Rows = list[dict[str, Any]]

# Log-probs and what comes of them: (column of the token strip, heading). Of equal columns the first is kept.
STRIP = (
    ("rollout_log_prob", "rollout"), ("old_log_prob", "old"), ("ref_log_prob", "ref"), ("new_log_prob", "new"),
    ("kl", "kl"), ("reward", "reward"), ("value", "value"), ("advantage", "adv"), ("return", "return"), ("weight", "weight"), ("ratio", "ratio"),
    ("entropy", "entropy"), ("loss_share", "loss share"),
)  # fmt: skip
OTHERS = " Tokens of the response without R are the environment's: no log-prob, value or loss is made of them."
MASKS = ("attention_mask", "response_mask", "loss_mask")
LONGEST_TEXT = 16  # of a token; what is longer is cut, as no number is
UNBOUND = 10_000  # wider than any table

Columns = dict[str, list[str]]  # heading -> its cells


def draw(tokens: Rows, screen: Console) -> None:
    """Print the tokens, in as many tables as the width asks for, and the legend."""
    columns = _columns(tokens)
    zeros, twins = _silent(columns)
    shown = {heading: cells for heading, cells in columns.items() if heading not in {*zeros, *twins}}
    for grid in _grids(tokens, shown, screen):
        screen.print(grid)
    if said := _beneath(zeros, twins):
        screen.print(said)
    screen.print(legend(list(columns)) + (OTHERS if _has_others(tokens) else ""), style="dim")


def _columns(tokens: Rows) -> Columns:
    """The cells of what is known of some of these tokens."""
    return {
        heading: [written(row[name], "number") + "*" * bool(name == "ratio" and row["clipped"]) for row in tokens]
        for name, heading in STRIP
        if any(row[name] is not None for row in tokens)
    }


def _silent(columns: Columns) -> tuple[list[str], dict[str, str]]:
    """Headings under which all is 0, and those whose cells are the same as an earlier heading's: heading -> that one."""
    zeros = [heading for heading, cells in columns.items() if {*cells} <= {"0", ABSENT}]
    twins: dict[str, str] = {}
    first: dict[tuple[str, ...], str] = {}
    for heading, cells in columns.items():
        if heading not in zeros and (kept := first.setdefault(tuple(cells), heading)) != heading:
            twins[heading] = kept
    return zeros, twins


def _beneath(zeros: list[str], twins: dict[str, str]) -> str:
    """What the columns that are left out would say: `old, new = rollout, return = adv, to the digits shown. kl = 0 throughout.`"""
    alike = [
        f"{', '.join(name for name, same in twins.items() if same == kept)} = {kept}"
        for kept in dict.fromkeys(twins.values())
    ]
    parts = [f"{'; '.join(alike)}: to the digits shown." if alike else "", f"{', '.join(zeros)} = 0 throughout." if zeros else ""]  # fmt: skip
    return " ".join(filter(None, parts))


def _grids(tokens: Rows, columns: Columns, screen: Console) -> Iterator[Grid]:
    """Tables that fit: each takes the columns for which it has room, and at least one."""
    taken: Columns = {}
    whole = True  # the first names the tokens fully
    for heading, cells in columns.items():
        more = taken | {heading: cells}
        if taken and _width(_grid(tokens, more, whole=whole), screen) > screen.width:
            yield _grid(tokens, taken, whole=whole)
            taken, whole = {heading: cells}, False
        else:
            taken = more
    yield _grid(tokens, taken, whole=whole)


def _width(grid: Grid, screen: Console) -> int:
    return screen.measure(grid, options=screen.options.update(width=UNBOUND)).maximum


def _grid(tokens: Rows, columns: Columns, *, whole: bool) -> Grid:
    """One table. `whole`: with id and masks beside position and text."""
    grid = Grid(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    grid.add_column("pos", justify="right", no_wrap=True)
    if whole:
        grid.add_column("id", justify="right", overflow="fold")
    grid.add_column("text", no_wrap=True, overflow="ellipsis", max_width=LONGEST_TEXT)
    if whole:
        grid.add_column("A R L", no_wrap=True)
    for heading in columns:
        grid.add_column(heading, justify="right", overflow="fold")
    for at, row in enumerate(tokens):
        text = Text(visible(row["text"]) if row["text"] is not None else ABSENT)
        masks = " ".join("1" if row[name] else ABSENT for name in MASKS)
        names = [written(row["token_id"], "text"), text, masks] if whole else [text]
        cells = [column[at] for column in columns.values()]
        grid.add_row(str(row["position"]), *names, *cells, style="" if row["loss_mask"] else "dim")
    return grid


def _has_others(tokens: Rows) -> bool:
    """Whether an environment wrote some of these tokens: a response has tokens that are not the policy's own."""
    own = [bool(row["response_mask"]) for row in tokens if row["attention_mask"]]
    return not all(own[own.index(True) :]) if any(own) else False
