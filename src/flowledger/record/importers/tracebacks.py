"""Tracebacks as logs have them: of one process among many, chained, and Ray's with the far process's frames behind."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from flowledger.record.importers.speakers import NOBODY, Speaker

HEAD = "Traceback (most recent call last)"
FRAME = re.compile(r'\s*File "(?P<file>[^"\n]{1,400})", line (?P<line>\d{1,9})(?:, in (?P<function>[\w<>.]{1,200}))?')
EXCEPTION = re.compile(r"(?P<kind>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:\([\w.]+\))?)(?:: (?P<message>.*))?$")
CHAINED = re.compile(r"(?:The above exception was the direct cause of|During handling of the above exception, another)")
RAY_CALL = re.compile(r"ray::(?P<what>[\w.]+)\([^)]*\) \(pid=(?P<pid>\d+)(?:, ip=(?P<ip>[\w.:]+))?")
MOST_FRAMES = 120
LONGEST_MESSAGE = 2_000
MOST_CONTINUED = 6  # lines of a message behind its first


class Frame(NamedTuple):
    """One line of a traceback."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(slots=True)
class Raised:
    """One exception with the frames that lead to it."""

    kind: str
    message: str
    frames: list[Frame]

    @property
    def sentence(self) -> str:
        """As Python prints it, its first line."""
        first = self.message.split("\n")[0]
        return f"{self.kind}: {first}" if first else self.kind


@dataclass(slots=True)
class Traceback:
    """A traceback that is read line by line; `feed` says whether the line was one of its."""

    speaker: Speaker
    line: int  # where it begins
    chain: list[Raised] = field(default_factory=list)  # as printed: the cause before what it led to
    calls: list[str] = field(default_factory=list)  # methods of far processes, as Ray names them
    who: Speaker = NOBODY  # the far process
    _frames: list[Frame] = field(default_factory=list)
    _after: bool = False  # an exception was read, and what follows may belong to it
    _continued: int = 0
    _chained: bool = False
    _blank: int = 0

    def called(self, text: str) -> bool:
        """Whether a line names a method of a far process, which the frames that follow are of."""
        if (call := RAY_CALL.search(text)) is None:
            return False
        self.calls.append(call["what"])
        self.who = Speaker(call["what"].split(".")[0], int(call["pid"][:12]), call["ip"] or "")
        return True

    def feed(self, text: str) -> bool:
        """Take a line. False once the traceback is over: the line is none of its."""
        if not text.strip():
            self._blank += 1
            return self._blank < 4
        self._blank = 0
        if (found := FRAME.match(text)) is not None:
            self._frame(found)
            return True
        if CHAINED.search(text):
            self._chained, self._after = True, False
            return True
        if HEAD in text:
            again = self._chained or not self._after
            self._chained = self._after = False
            return again
        if self._after:
            return self._behind(text)
        if text[:1].isspace() or set(text.strip()) <= {"^", "~"}:
            return True  # code of a frame
        return self._exception(text)

    @property
    def cause(self) -> Raised | None:
        """The innermost: what was printed first of a chain."""
        return self.chain[0] if self.chain else None

    def _frame(self, found: re.Match[str]) -> None:
        if self._after:  # Ray: the frames of the far process follow the exception of this one, and lead to its cause
            self._after = False
            if self.chain and not self._chained:
                outer = self.chain.pop()
                self._frames = outer.frames
        if len(self._frames) < MOST_FRAMES:
            self._frames.append(Frame(found["file"], int(found["line"]), found["function"] or "<module>"))

    def _exception(self, text: str) -> bool:
        found = EXCEPTION.match(text.strip())
        if found is None or not _is_exception(found["kind"]):
            return not self._frames  # a head without anything: wait for more
        kind, message = found["kind"], (found["message"] or "")[:LONGEST_MESSAGE]
        self.called(text)
        self.chain.append(Raised(kind, message, self._frames))
        self._frames, self._after, self._continued = [], True, 0
        return True

    def _behind(self, text: str) -> bool:
        """A line after the exception's: the rest of its message, or Ray's note on the far process."""
        if self.called(text):
            return True
        raised = self.chain[-1]
        more = text[:1].isspace() or raised.message.endswith((":", "\\n", ",")) or not raised.message
        if not more or self._continued >= MOST_CONTINUED:
            return False
        self._continued += 1
        raised.message = f"{raised.message}\n{text.strip()}"[:LONGEST_MESSAGE]
        return True


def _is_exception(kind: str) -> bool:
    """`OSError`, `queue.Empty`, `RayTaskError(ValueError)`; not `INFO` and not `done`."""
    name = kind.partition("(")[0].rpartition(".")[2]
    return name != name.lower() and name != name.upper()
