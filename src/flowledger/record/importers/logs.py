"""A console log of any framework, or of several: each line goes to whoever has a word for what stands in it.

A marker is looked for first, in the whole block and then in the line: most lines of a log hold none, and cost next to
nothing. A line that a traceback or a printed configuration waits for goes there, by the process that says it.
"""

from collections.abc import Callable, Iterator

from flowledger.ledger.rows import Row
from flowledger.record.importers import configs, console, crashes, memory_lines, trl
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.place import Place
from flowledger.record.importers.source import Source
from flowledger.record.importers.speakers import REPEATED, Speaker, split
from flowledger.record.importers.tracebacks import HEAD, RAY_CALL, Traceback
from flowledger.record.importers.waiting import waiting

MOST_OPEN = 200  # tracebacks of processes that speak at the same time
NO_LOGS = frozenset(
    {
        ".json",
        ".yaml",
        ".yml",
        ".toml",
        ".py",
        ".sh",
        ".md",
        ".html",
        ".parquet",
        ".pt",
        ".pth",
        ".bin",
        ".safetensors",
        ".npz",
        ".npy",
        ".svg",
        ".jinja",
    }
)
# Bytes that a text may have; of a log 3 % may be others (a hole that a full disk left).
TEXT = bytes(code for code in range(256) if code >= 32 or code in b"\t\n\r\x1b\b\f\a")
LONGEST_AWAITED, LONGEST_END = 64 << 10, 1_500
AROUND = 600  # characters before and behind the marker of a reading
LONGEST = 1 << 20  # characters of a line that is looked at

Numbers = Callable[[Place, str], Iterator[Row]]

# What stands in a line -> who reads numbers from it.
NUMBERS: tuple[tuple[str, Numbers], ...] = (
    ("step:", console.verl),
    ("Global step ", console.openrlhf),
    (".py:", console.slime),
    ("Train step ", console.areal_step),
    ("│", console.areal_table),
    ("= Epoch ", console.nemo_head),
    ("= Step ", console.nemo_head),
    ("  • ", console.nemo_line),
    ("  - ", console.nemo_line),
)
# Lines of a table -> whose they are, and what stands above the first.
TABLES = {"│": ("areal", b"Train step "), "  • ": ("nemo_rl", b"= Step "), "  - ": ("nemo_rl", b"= Step ")}
CONFIGURATION = frozenset({"{'", "Namespace(", configs.MEGATRON_HEAD})
READINGS = (
    ("memory allocated (", memory_lines.usage),
    ("memory allocated: ", memory_lines.older),
    ("Memory-Usage ", memory_lines.slime),
    ("Peak-Memory ", memory_lines.slime),
)
EPOCH, BAR = "'epoch': ", "%|"
OTHERS = (HEAD, "{'", "Namespace(", configs.MEGATRON_HEAD, "+ ", *configs.LAUNCHERS, "ray::", EPOCH)
ENDINGS = (
    "Final validation",
    "'train_runtime'",
    "Training completes",
    "has been reached",
    "raining completed",
    "Training finished",
)
NUMBER_MARKERS = frozenset(marker for marker, _ in NUMBERS)
MARKERS = {
    marker: marker.encode()
    for marker in (*NUMBER_MARKERS, *(marker for marker, _ in READINGS), *OTHERS, BAR, *ENDINGS, *crashes.markers())
}  # fmt: skip


def fits(source: Source) -> bool:
    """Any text; but no document that says by its name that it is something else."""
    head = source.head
    if source.path.suffix in NO_LOGS:
        return False
    return len(head.translate(None, TEXT)) * 33 <= len(head)


def read(source: Source, notes: Notes) -> Iterator[Row]:
    """Rows of every kind that a log has."""
    return Log(source, notes).rows()


class Log:
    """One log while it is read."""

    def __init__(self, source: Source, notes: Notes):
        self._source, self._notes = source, notes
        self._place = Place(source.path.name, notes)
        self._dicts = trl.Console(self._place, str(source.path))
        self._ends = crashes.Ends()
        self._open: dict[Speaker, Traceback] = {}
        self._dump: configs.Dump | None = None
        self._arguments: dict[str, object] | None = None

    def rows(self) -> Iterator[Row]:
        place = self._place
        for raw, block in self._source.blocks(self._notes):
            here = frozenset(self._markers(raw))
            numbers = tuple(pair for pair in NUMBERS if pair[0] in here)
            others = tuple(marker for marker in here - NUMBER_MARKERS if marker != BAR)
            bars = BAR in here
            for line in block:
                place.line += 1
                waits = self._open or self._dump is not None or self._arguments is not None
                if waits and self._awaited(line):
                    continue
                for marker, reader in numbers:
                    if marker in line:
                        yield from reader(place, line[:LONGEST])
                for marker in others:
                    if marker in line:
                        yield from self._other(line)
                        break
                if bars and BAR in line and line[:1] in " 0123456789":
                    yield from self._dicts.bar(line)
                if place.ready:
                    yield from place.take()
        yield from self._close()

    def _markers(self, raw: bytes) -> Iterator[str]:
        """What is looked for and stands in a block. What nobody would read now is not looked for: a scan costs time."""
        framework, configured = self._notes.framework, bool(self._notes.config)
        for marker, code in MARKERS.items():
            if configured and marker in CONFIGURATION:
                continue
            head = TABLES.get(marker)
            if head is not None and framework != head[0] and head[1] not in raw:
                continue
            if code in raw:
                yield marker

    def _awaited(self, line: str) -> bool:
        """Give a line to whoever of its process waits for more; whether it was theirs."""
        speaker, text = split(line[:LONGEST_AWAITED])
        self._notes.heard(speaker)
        if self._arguments is not None:
            if configs.MEGATRON_END in text:
                self._configured(self._arguments)
                self._arguments = None
                return True
            if (found := configs.argument(text)) is not None and len(self._arguments) < configs.MOST_LINES:
                self._arguments[found[0]] = found[1]
                return True
        if self._dump is not None and self._dump.speaker == speaker:
            if not self._dump.feed(text):
                if self._dump.whole and (config := self._dump.read()) is not None:
                    self._configured(config)
                self._dump = None
            return True
        opened = self._open.get(speaker)
        if opened is None:
            return False
        if opened.feed(text):
            return True
        self._end(speaker)
        return False

    def _other(self, line: str) -> Iterator[Row]:
        """Everything but the numbers of a step."""
        speaker, text = split(line)
        self._notes.heard(speaker)
        place = self._place
        if "[repeated" in text:
            text = REPEATED.sub("", text)
        for marker, reading in READINGS:
            if marker in text:
                at = text.find(marker)
                reading(place, text[max(at - AROUND, 0) : at + AROUND], speaker)
                return
        if HEAD in text or ("ray::" in text and RAY_CALL.search(text) is not None):
            self._traceback(speaker, text)
            return
        if EPOCH in text:
            yield from self._dicts.take(text)
        elif self._settings(speaker, text):
            return
        if any(marker in text for marker in ENDINGS) and crashes.finished(text):
            place.finished = True
        elif (end := crashes.of_line(text[:LONGEST_END], speaker, **self._where())) is not None:
            self._ends.add(end)
            if (found := waiting(text[:LONGEST_END], speaker)) is not None:
                self._ends.waits(found)

    def _settings(self, speaker: Speaker, text: str) -> bool:
        """Whether a line is the begin of, or holds, the run's configuration."""
        if configs.begins(text) and self._dump is None and not self._notes.config:
            self._dump = configs.Dump(speaker)
            self._dump.feed(text)
        elif configs.MEGATRON_HEAD in text:
            self._arguments = {}
        elif (found := configs.namespace(text)) is not None:
            self._configured(found)
        elif (command := configs.command(text)) is not None:
            self._notes.command = self._notes.command or command
        else:
            return False
        return True

    def _configured(self, config: dict[str, object]) -> None:
        self._notes.configured(config)
        if (framework := configs.framework_of(config)) is not None:
            self._notes.of(framework)

    def _traceback(self, speaker: Speaker, text: str) -> None:
        if speaker in self._open or len(self._open) >= MOST_OPEN:
            self._end(speaker if speaker in self._open else next(iter(self._open)))
        self._open[speaker] = Traceback(speaker, self._place.line)
        self._open[speaker].called(text)

    def _end(self, speaker: Speaker) -> None:
        """A traceback is over."""
        read = self._open.pop(speaker)
        where = self._where() | {"line": read.line, "place": f"{self._place.name}:{read.line}"}
        if (end := crashes.of_traceback(read, **where)) is not None:
            self._ends.add(end)

    def _where(self) -> dict[str, object]:
        """Where the log is. Numbers that were printed and wait for their step have ended it: no progress after an end."""
        place, printed = self._place, self._dicts.awaits
        waits = printed is not None
        return {
            "place": f"{place.name}:{place.line}", "line": place.line, "step": place.now if printed is None else printed + 1,
            "steps_said": place.steps_said + waits, "finished": place.finished and not waits,
        }  # fmt: skip

    def _close(self) -> Iterator[Row]:
        for speaker in list(self._open):
            self._end(speaker)
        yield from self._dicts.close()
        yield from self._place.close()
        yield from self._ends.rows(self._place.steps_said, self._place.line)
        place, notes = self._place, self._notes
        if not (place.said or self._ends.found or notes.config or notes.command):
            self._notes.passed_over.append(str(self._source.inside))
