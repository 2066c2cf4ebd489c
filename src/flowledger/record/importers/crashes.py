"""What ended a run: of all tracebacks and last words in a log the one that the others follow from, as a finding."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from flowledger.ledger.rows import FindingRow, MemoryRow, Row
from flowledger.record.importers import oom
from flowledger.record.importers.speakers import NOBODY, Speaker, rank_of
from flowledger.record.importers.tracebacks import Frame, Raised, Traceback
from flowledger.record.importers.waiting import MOST as MOST_WAITING
from flowledger.record.importers.waiting import Waiting

MOST = 300  # ends that are told apart; more are counted
TRACEBACK_WEIGHT = 5
SECONDARY_WEIGHT = 1.5  # of a traceback that only tells of another process's end
SHOWN_FRAMES = 12
LAST_LINES = 40


@dataclass(slots=True)
class End:
    """One way in which a process ended, or said that it would."""

    kind: str
    message: str
    weight: float
    speaker: Speaker
    place: str  # file:line
    line: int
    step: int | None
    steps_said: int  # how many steps had been printed by then
    finished: bool  # the training had come to its end
    stage: str | None = None
    phase: str | None = None
    frames: list[Frame] = field(default_factory=list)
    chain: list[str] = field(default_factory=list)
    times: int = 1
    others: list[str] = field(default_factory=list)  # the other processes that ended like this

    @property
    def sentence(self) -> str:
        first = self.message.split("\n")[0]
        return f"{self.kind}: {first}" if first and not first.startswith(self.kind) else first or self.kind


class Ends:
    """The ends that a log tells of."""

    def __init__(self) -> None:
        self.found: list[End] = []
        self.more = 0
        self.waiting: dict[tuple[int, str], Waiting] = {}  # by rank and group
        self._known: dict[tuple[str, str], End] = {}

    def add(self, end: End) -> None:
        key = (end.kind, re.sub(r"\d+", "#", end.message[:200]))
        if (same := self._known.get(key)) is not None and same.steps_said == end.steps_said:
            same.times += 1
            if len(same.others) < 8 and end.speaker not in (same.speaker, NOBODY):
                same.others.append(str(end.speaker))
            same.stage, same.frames = same.stage or end.stage, same.frames or end.frames
        elif len(self.found) < MOST:
            self.found.append(end)
            self._known[key] = end
        else:
            self.more += 1

    def waits(self, found: Waiting) -> None:
        """A rank that hangs; the collective that it said first counts."""
        if len(self.waiting) < MOST_WAITING:
            self.waiting.setdefault((found.rank, found.group), found)

    def rows(self, steps_said: int, lines: int) -> Iterator[Row]:
        """Findings: `crash` for what ended the run, `exception` for what it went on after, and a reading of memory.

        A line that only looks like an exception counts among the last ones of the log.
        """
        last = [end for end in self.found if end.steps_said >= steps_said and not end.finished]
        last = [end for end in last if end.weight > 1 or end.line > lines - LAST_LINES]
        went_on = [
            end for end in self.found if end.weight > SECONDARY_WEIGHT and (end.steps_said < steps_said or end.finished)
        ]
        if last:
            end = max(last, key=lambda one: one.weight)  # of equal ones the first
            row = _crash(end, [other for other in last if other is not end])
            row.evidence = [*(row.evidence or ()), *map(str, self.waiting.values())]
            yield row
            if (reading := memory(end)) is not None:
                yield reading
        for end in went_on[:20]:
            yield _handled(end)


def of_traceback(read: Traceback, **where: Any) -> End | None:
    """What a traceback says; None for one that was cut off before its exception."""
    cause = read.cause
    if cause is None:
        return None
    cause = _better(read.chain)
    speaker = read.who if read.who is not NOBODY else read.speaker
    if read.speaker.rank is not None:
        speaker = speaker._replace(rank=read.speaker.rank)
    frames = [frame for raised in read.chain for frame in raised.frames] if not cause.frames else cause.frames
    weight = SECONDARY_WEIGHT if secondary(f"{cause.kind}: {cause.message}") else TRACEBACK_WEIGHT
    stage = stage_of(frames, NOBODY) or _stage_of_calls(read.calls) or stage_of([], speaker)
    return End(
        kind=cause.kind, message=cause.message, weight=weight, speaker=speaker, stage=stage,
        phase=_phase(frames) if stage in ("update_actor", "update_critic", "old_log_prob", "ref_log_prob", "values") else None,
        frames=frames, chain=[raised.sentence for raised in read.chain], **where,
    )  # fmt: skip


def of_line(text: str, speaker: Speaker, **where: Any) -> End | None:
    """What a line without a traceback says of an end; None for most."""
    for row, pattern in _lines():
        if row["marker"] in text and (found := pattern.search(text)) is not None:
            groups = found.groupdict()
            if groups.get("rank") and (rank := rank_of(groups["rank"])) is not None:
                speaker = speaker._replace(rank=rank)
            if groups.get("pid"):
                speaker = speaker._replace(pid=int(groups["pid"][:12]))
            kind, message = groups.get("kind") or row["kind"], groups["message"].strip()[:2000]
            if groups.get("kind"):
                message = message.partition(": ")[2]
            weight = min(row["weight"], SECONDARY_WEIGHT) if secondary(text) else row["weight"]
            return End(kind=kind, message=message, weight=weight, speaker=speaker, stage=stage_of([], speaker), **where)
    return None


def markers() -> tuple[str, ...]:
    """What stands in every line that `of_line` may have a word for."""
    return tuple(dict.fromkeys(row["marker"] for row, _ in _lines()))


def finished(text: str) -> bool:
    """Whether a line says that the training came to its end."""
    return re.search(_tables()["finished"]["pattern"], text) is not None


def secondary(text: str) -> bool:
    """Whether an exception only tells of another process's end."""
    return re.search(_tables()["secondary"]["pattern"], text) is not None


def stage_of(frames: Sequence[Frame], speaker: Speaker = NOBODY) -> str | None:
    """The stage that frames lie in, the outermost first; without a known function by files, then by the process."""
    stage: str | None = None
    for frame in frames:
        for row in _tables()["function"]:
            if _fits(row["name"], _function(frame)) and stage not in row.get("not_over", ()):
                stage = row["stage"]
                break
    if stage is None:
        stage = next(
            (r["stage"] for f in reversed(frames) for r in _tables()["file"] if re.search(r["path"], f.file)), None
        )
    if stage is None and speaker.role:
        stage = next((r["stage"] for r in _tables()["process"] if re.search(r["name"], speaker.role)), None)
    return stage


def _stage_of_calls(calls: Sequence[str]) -> str | None:
    """By the methods that Ray names: `WorkerDict.actor_rollout_update_actor` has roles before the function's name."""
    for call in reversed(calls):
        words = call.rpartition(".")[2].split("_")
        for first in range(len(words)):
            if (stage := stage_of([Frame("", 0, "_".join(words[first:]))])) is not None:
                return stage
    return None


@lru_cache(maxsize=4096)
def stage_of_reading(head: str) -> str | None:
    """The stage that a reading of memory belongs to, by what the log calls it; None where it is of the job's start."""
    if re.search(_tables()["start"]["words"], head, re.IGNORECASE):
        return None
    return next((row["stage"] for row in _tables()["reading"] if re.search(row["words"], head, re.IGNORECASE)), None)


def memory(end: End) -> MemoryRow | None:
    """The device at the moment of an end that states sizes."""
    row = oom.memory_row(oom.sizes(end.message))
    if row is not None:
        row.step, row.stage, row.phase, row.rank = end.step, end.stage, end.phase, end.speaker.rank
    return row


def _crash(end: End, others: Sequence[End]) -> FindingRow:
    who = str(end.speaker)
    at = "/".join(part for part in (end.stage, end.phase) if part)
    evidence = [f"{end.place}: {end.sentence}"]
    evidence += [f"raised through {sentence}" for sentence in end.chain if sentence != end.sentence][:4]
    evidence += oom.sentences(oom.sizes(end.message))
    evidence += [f"frame {frame}" for frame in end.frames[-SHOWN_FRAMES:]]
    if end.times > 1:
        evidence.append(f"said {end.times} times{', also by ' + ', '.join(end.others) if end.others else ''}")
    evidence += [f"{other.place}: also {other.sentence[:200]}" for other in others[:6]]
    return FindingRow(
        id="crash", verdict="fail", severity="critical", order="import", step=end.step, stage=end.stage, phase=end.phase,
        rank=end.speaker.rank, confidence=0.95 if end.weight >= TRACEBACK_WEIGHT else 0.7,
        message=f"{end.sentence}{f' (in {at})' if at else ''}{f' of {who}' if who else ''}",
        evidence=evidence,
    )  # fmt: skip


def _handled(end: End) -> FindingRow:
    after = "the training had come to its end" if end.finished else "the run went on"
    return FindingRow(
        id="exception", verdict="pass", order="import", step=None if end.finished else end.step, stage=end.stage, rank=end.speaker.rank,
        message=f"{end.sentence[:300]} ({end.times}x); {after}", evidence=[f"{end.place}: {end.sentence[:500]}"],
    )  # fmt: skip


def _better(chain: Sequence[Raised]) -> Raised:
    """The innermost exception that is one of its own and not the end of another process."""
    return next((one for one in chain if not secondary(f"{one.kind}: {one.message}")), chain[0])


def _phase(frames: Sequence[Frame]) -> str | None:
    for frame in reversed(frames):
        for row in _tables()["phase"]:
            if _fits(row["name"], _function(frame)):
                return str(row["phase"])
    return None


def _function(frame: Frame) -> str:
    """The bare name; Ray's task methods carry the role before it: `actor_rollout_update_actor`."""
    return frame.function.rpartition(".")[2]


@lru_cache(maxsize=16384)
def _fits(names: str, function: str) -> bool:
    return re.fullmatch(names, function) is not None


@cache
def _lines() -> tuple[tuple[dict[str, Any], re.Pattern[str]], ...]:
    return tuple((row, re.compile(row["pattern"])) for row in _tables()["line"])


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(files("flowledger.record.importers").joinpath("crashes.toml").read_text(encoding="utf-8"))
