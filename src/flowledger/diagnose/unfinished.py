"""How far a log came, where it says how many steps there are to be: one that stops early has not said so itself."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from flowledger.ledger.reader import Ledger

# What a trainer announces, or a bar of progress that is named for training; an engine's bars count prompts.
TOTAL = re.compile(
    r"total (?:training |optimi[sz]ation )?steps\s*[:=]\s*([\d,]+)|training progress:[^\n\r]{0,80}?\|\s*\d+/(\d+) \[",
    re.IGNORECASE,
)
LONGEST = 1 << 20  # characters at the start of a log in which it is looked for


def stopped_early(ledger: Ledger, paths: Iterable[Path]) -> Iterator[str]:
    """`it stops at step 24 of 290`; nothing where the end was reached, or nothing says how many there are to be."""
    (last,) = ledger.rows("SELECT max(step) AS step FROM metrics WHERE source <> 'plan'")
    total = max((_total(path) for path in paths if path.is_file()), default=0)
    if last["step"] is not None and 0 < last["step"] < total - 1:  # steps are counted from 0 or from 1
        yield f"it stops at step {last['step']:,} of {total:,}"


def _total(path: Path) -> int:
    with path.open("r", encoding="utf-8", errors="replace") as file:
        found = TOTAL.findall(file.read(LONGEST))
    return max((int((told or bar).replace(",", "")) for told, bar in found), default=0)
