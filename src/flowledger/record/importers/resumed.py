"""Numbers met twice: a run that was resumed went back some steps, and two files may say the same.

Of one format the later wins: a metric that comes again at an earlier step than its last means that the run was resumed
there, and what the same format has said of that step and of later ones is taken back; at the same step that number alone
is. Of two formats the first wins: a console repeats what the JSONL beside it says; and so it does within a format whose
files are no record of time, such as the state of two checkpoints.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from flowledger.ledger.rows import MetricRow

MOST_TWICE = 200_000  # (name, step) that came twice; further ones stay as they are
MOST_RESUMES = 200
MOST_NAMES = 100_000
ROOM = 256 << 20  # bytes for what was said
MOST_STEP = 1 << 24  # a step beyond is none that a run comes to

Said = dict[str, bytearray]  # name -> one byte a step, 1 where it was said


class Written(msgspec.Struct):
    """What is needed of a written row to know whether it stays."""

    seq: int = -1
    step: int | None = None
    raw_name: str = ""


class Seen:
    """What one part was told, and which of its rows no longer count. The rows of a format come together.

    `several`: more than one format speaks of metrics. `last` is open to the caller: as long as a number comes at a later
    step than its last, and nothing else is `watched`, there is nothing to ask.
    """

    def __init__(self, several: bool = False) -> None:
        self.resumed: list[tuple[int, int]] = []  # (last step, step it went back to)
        self.repeated = 0  # numbers that were said already
        self.last: dict[str, int] = {}  # own name -> its last step in this format
        self.watched = several
        self._several, self._ordered = several, True
        self._form: str | None = None
        self._began = 0  # the format's first row
        self._spans: list[tuple[int, int, int]] = []  # rows from .. to below .. of at least this step are taken back
        self._twice: set[tuple[str, int]] = set()  # (own name, step): all but the last are taken back
        self._room = ROOM
        self._now: Said = {}
        self._before: Said = {}

    def begin(self, form: str, seq: int, ordered: bool) -> None:
        """The rows of a format begin, or go on with another file. `ordered`: it was written while the run went on."""
        self._ordered, self.watched = ordered, self._several or not ordered
        if form == self._form:
            return
        for name, bits in self._now.items():
            self._before[name] = _either(bits, self._before.get(name, bytearray()))
        self._form, self._began, self._now, self.last = form, seq, {}, {}

    def takes(self, row: MetricRow, seq: int) -> bool:
        """Whether a number is to be written; `seq` is what the row would have."""
        step = row.step
        if step is None or not 0 <= step < MOST_STEP:
            return True
        if self.watched and self._said(row.name, step):
            self.repeated += 1
            return False
        if not self._ordered:
            return True
        last = self.last.get(row.raw_name)
        if last is not None and step <= last:
            self._met_again(row.raw_name, step, last, seq)
        if last is not None or len(self.last) < MOST_NAMES:
            self.last[row.raw_name] = step
        return True

    def leave_out(self, files: str | Path) -> dict[str, int]:
        """Remove from a closed part what was taken back; rows removed by table."""
        removed: dict[str, int] = {}
        if not self._spans and not self._twice:
            return removed
        parts = [file for file in sorted(Path(files).glob("*-*.jsonl")) if not file.name.startswith("findings-")]
        kept = self._last_rows(parts) if self._twice else {}
        decode = msgspec.json.Decoder(Written).decode
        for file in parts:
            table, aside = file.name.rpartition("-")[0], file.with_suffix(".kept")
            with file.open("rb") as old, aside.open("wb") as new:
                for line in old:
                    if self._stays(decode(line), kept):
                        new.write(line)
                    else:
                        removed[table] = removed.get(table, 0) + 1
            aside.replace(file)
        return removed

    def _last_rows(self, parts: Iterable[Path]) -> dict[tuple[str, int], int]:
        """Of what was said twice the row that stays."""
        decode, found = msgspec.json.Decoder(Written).decode, dict[tuple[str, int], int]()
        for file in parts:
            if file.name.startswith("metrics-"):
                with file.open("rb") as lines:
                    for row in map(decode, lines):
                        if row.step is not None and (key := (row.raw_name, row.step)) in self._twice:
                            found[key] = max(row.seq, found.get(key, -1))
        return found

    def _stays(self, row: "Written", kept: dict[tuple[str, int], int]) -> bool:
        if (step := row.step) is None:
            return True
        if any(begin <= row.seq < end and step >= back for begin, end, back in self._spans):
            return False
        return not row.raw_name or kept.get((row.raw_name, step), row.seq) == row.seq

    def _said(self, name: str, step: int) -> bool:
        """Whether another format, or another file that is no record of time, has said it; it counts as said from now on."""
        now = self._now.get(name)
        if (now is None or step >= len(now)) and (now := self._longer(name, step)) is None:
            return False
        said = not self._ordered and bool(now[step])
        now[step] = 1
        if self._before and (before := self._before.get(name)) is not None and step < len(before):
            return said or bool(before[step])
        return said

    def _longer(self, name: str, step: int) -> bytearray | None:
        """Room for a step of a name; None where there is none left, and what comes twice is no longer seen."""
        now = self._now.setdefault(name, bytearray())
        more = step + 1 + step // 4 - len(now)
        if more > self._room:
            return None
        self._room -= more
        now.extend(bytes(more))
        return now

    def _met_again(self, name: str, step: int, last: int, seq: int) -> None:
        if step == last:
            if len(self._twice) < MOST_TWICE:
                self._twice.add((name, step))
            return
        if len(self.resumed) == MOST_RESUMES:
            return
        self.resumed.append((max(self.last.values()), step))
        self._spans.append((self._began, seq, step))
        self.last.update({known: step - 1 for known, at in self.last.items() if at >= step})


def _either(a: bytearray, b: bytearray) -> bytearray:
    long, short = (a, b) if len(a) >= len(b) else (b, a)
    whole = int.from_bytes(long[: len(short)], "little") | int.from_bytes(short, "little")
    return bytearray(whole.to_bytes(len(short), "little")) + long[len(short) :]
