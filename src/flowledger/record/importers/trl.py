"""TRL and Hugging Face's Trainer: dicts on the console, trainer_state.json, completions as Parquet."""

import re
from collections.abc import Iterator

from flowledger.ledger.rows import MetricRow, Row
from flowledger.record.importers import figures, jsons
from flowledger.record.importers.figures import pairs
from flowledger.record.importers.names import Names
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.place import Place
from flowledger.record.importers.source import Source

# The training's has no name before it. A file may hold several one behind the other, each drawn over the one before.
BAR = re.compile(r"(?:^|[\]\r])\s*\d{1,3}%\|[^|]*\| (\d{1,12})/(\d{1,12}) \[")
OWN_STEP = ("step", "global_step")
AS_GRPO = "TRL does not say which trainer made its numbers: read as GRPO's; for RLOO give the file or its directory a name with rloo"


def table_of(where: str, notes: Notes) -> str:
    """The table of names. GRPO and RLOO call different numbers `kl` and `clip_ratio`, and nothing in the numbers tells."""
    if "rloo" in where.lower():
        return "trl_rloo"
    if "grpo" not in where.lower():
        notes.remark(AS_GRPO)
    return "trl_grpo"


class Console:
    """The dicts that the Trainer prints. They name no step: the progress bar that is drawn anew behind each does."""

    def __init__(self, place: Place, path: str):
        self._place, self._path = place, path
        self._held: list[tuple[str, float]] = []
        self._names: Names | None = None
        self._order = 0
        self._bar: int | None = None
        self._total: int | None = None

    def take(self, text: str) -> Iterator[Row]:
        """`{'loss': '0.0123', 'grad_norm': …, 'epoch': '0.01'}`."""
        found = list(pairs(text[text.find("{") :]))
        if not found or not any(key == "epoch" for key, _ in found):
            return
        yield from self._give(self._bar)
        self._held = found

    def bar(self, text: str) -> Iterator[Row]:
        """A progress bar: how many steps are done, once there are dicts that need to know."""
        found = BAR.findall(text)
        if not found:
            return
        done, total = map(int, found[-1])
        if self._total is None:
            self._total = total  # that of an evaluation comes later, and has another
        if total == self._total:
            self._bar = done
            yield from self._give(done)

    @property
    def awaits(self) -> int | None:
        """The step that a dict which was printed, and still waits for its bar, will have; None where none waits."""
        if not any(key in ("loss", "reward") for key, _ in self._held):
            return None
        return self._bar if self._bar is not None else self._order + 1

    def close(self) -> Iterator[Row]:
        yield from self._give(self._bar)

    def _give(self, step: int | None) -> Iterator[MetricRow]:
        """The rows of the dict that waits."""
        if not self._held:
            return
        held, self._held = dict(self._held), []
        self._place.of("trl")
        stated = next((figures.step(held[key]) for key in OWN_STEP if key in held), step)
        self._order += 1
        if stated is None:
            stated = self._order
            self._place.notes.remark("the log states no steps: its dicts are numbered 1, 2, … in their order")
        if "loss" in held or "reward" in held:
            self._place.ended(stated)
        if self._names is None:
            self._names = Names(table_of(self._path, self._place.notes))
        for key, value in held.items():
            if key not in OWN_STEP:
                yield self._names.row(key, value, stated)


def fits_state(source: Source) -> bool:
    """`trainer_state.json` of a checkpoint."""
    head = source.head
    return head.lstrip()[:1] == b"{" and (b'"log_history"' in head or source.name == "trainer_state.json")


def read_state(source: Source, notes: Notes) -> Iterator[Row]:
    """The `log_history`: every entry has its step."""
    notes.of("trl")
    names: Names | None = None
    for entry in jsons.rows_of(jsons.elements(source, notes, "log_history"), notes, f"{source.path.name}: log_history"):
        if (step := figures.step(entry.get("step"))) is None:
            notes.skip("an entry of log_history without a step", source.path.name)
            continue
        names = names or Names(table_of(str(source.path), notes))
        for key, value in entry.items():
            told = value if type(value) is float else figures.finite(value)
            if told is None and figures.too_large(value):
                notes.skip(figures.TOO_LARGE, f"{source.path.name}: step {step}, {key}")
            if told is not None and key not in OWN_STEP:
                yield MetricRow(name=names[key], raw_name=key, value=told, step=step)
