"""Two sizes that do not go together, as the text of an exception names them, and what the run knows of each."""

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

from flowledger.diagnose.orders.ratios import cut_of
from flowledger.flow.dims import parse_shape
from flowledger.flow.tensors import tensors

_LIST = r"[\[(]([\d, ]+?),?[\])]"
# (what kind of clash, its words). Two groups are sizes; of lists they are shapes. Texts of torch 2.x and of verl's DataProto.
WORDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(text, re.IGNORECASE))
    for kind, text in (
        ("broadcast", r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)(?: at non-singleton dimension (\d+))?"),
        ("broadcast", r"expanded size of the tensor \((\d+)\) must match the existing size \((\d+)\)(?: at non-singleton dimension (\d+))?"),
        ("join", r"sizes of tensors must match except in dimension \d+\. (?:expected|got) (?:size )?(\d+) (?:but got size|and) (\d+)"),
        ("join", rf"stack expects each tensor to be equal size, but got {_LIST} at entry \d+ and {_LIST} at entry"),
        ("reshape", rf"shape '?{_LIST}'? is invalid for input of size (\d+)"),
        ("product", r"mat1 and mat2 shapes cannot be multiplied \((\d+x\d+) and (\d+x\d+)\)"),
        ("chunk", r"equal chunk.*?size of \w+:? ?(\d+) and chunk:? ?(\d+)"),
        ("divisor", r"(?:^|\D)(\d+) (?:is )?not divisible by (?:\w+[ =(]+)?(\d+)"),
        ("shapes", rf"(?:shape|size)s?\D{{0,40}}{_LIST}\D{{1,40}}{_LIST}"),
    )
)  # fmt: skip


class Clash(NamedTuple):
    """Two shapes (or sizes: shapes of one dimension) that an exception says do not go together."""

    kind: str
    left: tuple[int, ...]
    right: tuple[int, ...]
    text: str


# How a reader of logs ends the sentence of a crash: by where it was, and who said it.
_WHERE = re.compile(r" \(in [a-z_/]+\)(?: of \S.*)?$")
_LOSS = re.compile(r"\bin \w*loss\w*$|\(in [a-z_]+/loss\)", re.MULTILINE)  # the frame of a function that makes a loss


def clashes(text: str) -> Iterator[Clash]:
    """Each one that a text names, once, in the order of the text's lines."""
    seen = set()
    for line in text.splitlines():
        for kind, pattern in WORDS:
            if (found := pattern.search(line)) and (pair := (_sizes(found[1]), _sizes(found[2]))) not in seen:
                seen.add(pair)
                yield Clash(kind, *pair, _WHERE.sub("", line.strip()))
                break


def dims_of_loss(text: str, stage: str | None) -> frozenset[str]:
    """Symbols of the dimensions that tensors have where a loss is made; empty where a text does not say that it was made there."""
    if not _LOSS.search(text):
        return frozenset()
    place = f"{stage or 'update_actor'}/loss"
    there = (row for row in tensors().values() if place in row.written_by or place in row.readers)
    return frozenset(symbol for row in there for form in row.forms for dim in form.dims for symbol in dim.symbols)


def named(size: int, sizes: Mapping[str, int]) -> str:
    """`512 (S_resp)`: a size with the dimensions that have it, two at most."""
    symbols = [text for text, known in sizes.items() if known == size and size > 1]
    return f"{size} ({' or '.join(symbols[:2])})" if symbols else str(size)


def told(clash: Clash, sizes: Mapping[str, int], degrees: Mapping[str, int], group: int) -> tuple[str, str]:
    """(step of the order `shape_mismatch` that it belongs to, the cause in words; empty where nothing names it)."""
    apart = [pair for pair in zip(clash.left, clash.right, strict=False) if pair[0] != pair[1] and 0 not in pair]
    if clash.kind in ("chunk", "divisor") and apart:
        return "logical", f"{named(apart[0][0], sizes)} cannot be dealt out to {named(apart[0][1], sizes)} equally"
    if clash.kind == "product":
        return "operator", f"a matrix of width {clash.left[-1]} meets one of height {clash.right[0]}"
    if clash.kind == "reshape":
        return "mask", f"{clash.right[0]} elements do not fill {list(clash.left)}"
    if not apart or len(clash.left) != len(clash.right):
        return "mask", ""
    large, small = max(apart[0]), min(apart[0])
    if group > 1 and large == small * group and small == sizes.get("B_prompt", small):
        return "logical", (
            f"{named(large, sizes)} is n = {group} times {named(small, sizes)}: prompts on one side, their samples on the other"
        )
    symbols = {text for text, size in sizes.items() if size in (large, small)}
    if cut := cut_of(Fraction(large, small), degrees, symbols):
        return "local", (
            f"{named(large, sizes)} is {cut.factor} times {named(small, sizes)}: one side is cut by {cut}, {cut.kind}, the "
            "other is not"
        )
    names = [named(size, sizes) for size in (large, small)]
    return "mask", f"{names[0]} stands against {names[1]}" if any("(" in name for name in names) else ""


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in re.findall(r"\d+", text))


def within(sizes: Mapping[str, int], symbols: frozenset[str]) -> dict[str, int]:
    """Of named sizes those of dimensions that are made of some symbols; all where none are given."""
    return {text: size for text, size in sizes.items() if not symbols or parse_shape(f"[{text}]")[0].symbols <= symbols}
