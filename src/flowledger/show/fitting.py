"""How a table is fitted into a terminal: widths of columns, names over several lines, or no limit at all."""

import re

from rich.console import Console
from rich.segment import Segments
from rich.table import Table as Grid
from rich.text import Text

from flowledger.show.columns import Column, Table

ROOMY = 150  # from this width on, long sentences stand in the table itself
WRAPPED = frozenset({
    ("shapes", "logical_shape"), ("shapes", "common_bug"), ("lifetimes", "readers"), ("findings", "message"),
    ("findings", "next_step"), ("findings", "needs"), ("plan_chain", "quantity"), ("plan_chain", "key"), ("plan_chain", "arithmetic"),
    ("plan_checks", "message"), ("plan_checks", "needs"), ("plan_lifetimes", "readers"), ("plan_advice", "key"), ("plan_advice", "costs"),
    ("plan_largest", "what"), ("plan_largest", "key"), ("mesh", "ranks"),
    ("diff_shapes", "told"), ("diff_only_planned", "tensors"), ("diff_only_planned", "why"), ("diff_only_recorded", "tensors"),
    ("diff_only_recorded", "why"), ("diff_checks", "message"), ("diff_checks", "why"), ("diff_findings", "message"),
})  # fmt: skip
# Widths where a terminal is narrower than ROOMY: what does not fit goes on in the next line, so that nothing is lost.
NARROW: dict[tuple[str, str], int] = {
    ("shapes", "stage"): 12, ("shapes", "tensor_name"): 18, ("shapes", "logical_shape"): 14, ("shapes", "local_shape"): 9,
    ("shapes", "mask"): 14, ("shapes", "owner_rank"): 7, ("shapes", "lifetime"): 10, ("shapes", "common_bug"): 6,
    ("memory", "stage"): 14, ("memory", "instant"): 5,
    ("lifetimes", "born_at"): 13, ("lifetimes", "tensor_name"): 19, ("lifetimes", "readers"): 14, ("lifetimes", "freed_at"): 14, ("lifetimes", "declared_freed_by"): 12,
    ("lifetimes", "lifetime"): 11, ("plan_chain", "key"): 18,
    ("plan_lifetimes", "born_at"): 12, ("plan_lifetimes", "tensor_name"): 17, ("plan_lifetimes", "readers"): 13,
    ("plan_lifetimes", "freed_at"): 12, ("plan_lifetimes", "lifetime"): 11,
    ("plan_advice", "key"): 18, ("plan_advice", "before"): 8, ("plan_advice", "after"): 8, ("plan_advice", "peak_stage"): 8,
    ("plan_largest", "key"): 22, ("diff_shapes", "stage"): 12, ("diff_shapes", "tensor_name"): 15, ("diff_shapes", "planned"): 16,
    ("diff_shapes", "recorded"): 16, ("diff_shapes", "outcome"): 9, ("diff_only_planned", "stage"): 12, ("diff_only_planned", "tensors"): 40,
    ("diff_only_recorded", "stage"): 12, ("diff_only_recorded", "tensors"): 40, ("diff_checks", "outcome"): 9, ("diff_checks", "id"): 14,
}  # fmt: skip
SPACIOUS = 125  # from this width on, these columns get more
SPACIOUS_WIDTHS = {
    ("shapes", "logical_shape"): 32, ("shapes", "local_shape"): 16, ("plan_chain", "key"): 34,
    ("plan_lifetimes", "born_at"): 21, ("plan_lifetimes", "tensor_name"): 19, ("plan_lifetimes", "readers"): 32,
    ("plan_lifetimes", "freed_at"): 21, ("plan_advice", "key"): 36, ("plan_advice", "peak_stage"): 12,
    ("plan_largest", "key"): 58,
}  # fmt: skip
LEAST = 12  # columns for the symbols of a shape
LONGEST = 100_000  # columns of a line that nothing is squeezed into


def widths_of(table: Table, columns: list[Column], lines: list[list[Text]], screen: Console) -> list[int | None]:
    """The widths that columns get where sentences find no room. No number of a shape is broken: its column takes what it
    needs for that from another column of shapes, where that has it."""
    known = NARROW | SPACIOUS_WIDTHS if screen.width >= SPACIOUS else NARROW
    widths = [known.get((table.name, column.name)) for column in columns]
    shapes = {
        number: (width, max((_unbroken(line[number]) for line in lines), default=0))
        for number, (column, width) in enumerate(zip(columns, widths, strict=True))
        if column.form == "shape" and width
    }
    lacking = sum(max(0, need - width) for width, need in shapes.values())
    for number, (width, need) in shapes.items():
        given = min(lacking, max(0, width - max(need, LEAST)))
        lacking -= given
        widths[number] = max(width - given, need)
    return widths


def folded(name: str, width: int) -> str:
    """A long name over several lines, broken behind `.`, `/`, `_` or `..` rather than in the middle of a word or number."""
    lines = [""]
    for piece in re.split(r"(?<=[./_=])(?!\.)", name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def fitted(cell: Text, width: int | None) -> Text:
    """A name that is too long for its column, folded, and so a range of numbers; sentences and shapes wrap by themselves."""
    if width is None or len(cell.plain) <= width:
        return cell
    if " " in cell.plain or "\n" in cell.plain:
        long = [word for word in re.finditer(r"\S+\.\.\S+", cell.plain) if len(word[0]) > width]
        return Text("\n").join(cell.divide([word.start() + word[0].index("..") + 2 for word in long])) if long else cell
    return Text(folded(cell.plain, width), style=cell.style, spans=cell.spans if not cell.spans else [])


def _unbroken(cell: Text) -> int:
    """Characters of the longest number of a shape, with what cannot be parted from it: `[12059152..`."""
    return max((len(part) for part in re.split(r"(?<=\.\.)|\s", cell.plain) if re.match(r"\[?\d", part)), default=0)


def print_whole(grid: Grid, screen: Console) -> None:
    """Print a grid with lines as long as they need: a terminal wraps them, a file or a pager has them whole."""
    options = screen.options.update(width=LONGEST, max_width=LONGEST)
    screen.print(Segments(list(screen.render(grid, options))), crop=False, soft_wrap=True, end="")


def is_cramped(grid: Grid, screen: Console) -> bool:
    """Whether some of its words would be cut at this width."""
    return grid.__rich_measure__(screen, screen.options.update(width=LONGEST, max_width=LONGEST)).minimum > screen.width
