"""What an import learns beside rows: whose run it is, how it was configured, and what could not be read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowledger.record.importers.speakers import Speaker, trains
from flowledger.record.importers.trace_clocks import Clocks

EXAMPLES = 5  # places that are named; the others are counted
MOST_REASONS = 100
MOST_HEARD = 100_000


@dataclass(slots=True)
class Notes:
    """Filled while files are read. The first word on framework and configuration counts."""

    framework: str | None = None
    framework_version: str | None = None
    assumed: str | None = None  # the framework of files that do not say, as the user told
    config: dict[str, Any] = field(default_factory=dict)  # as the framework itself prints it
    command: str | None = None  # the launch command, as a shell echoed it
    columns: dict[str, str] = field(default_factory=dict)  # of tables: the name of a column -> the name that it got
    remarks: list[str] = field(default_factory=list)  # what a reader of the numbers must know
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> how often
    examples: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)  # files of a directory that are of no known form
    files_of: dict[str, list[Path]] = field(
        default_factory=dict
    )  # form -> the files that are read as it, in their order
    world: int | None = None  # ranks of the job, as a trace says
    ranks: set[int] = field(default_factory=set)  # that were heard of besides in rows
    workers: set[tuple[str, int]] = field(
        default_factory=set
    )  # processes that train, as a log names them: address, pid
    clocks: Clocks = field(default_factory=Clocks)  # of traces
    whose: dict[int, tuple[str, str]] = field(
        default_factory=dict
    )  # rank -> the worker, by the names of files, whose traces are its
    odd_rewards: dict[str, int] = field(default_factory=dict)  # what stood where a reward's number should -> how often
    odd_at: list[str] = field(default_factory=list)  # the first samples that had one

    def skip(self, reason: str, where: str = "", count: int = 1) -> None:
        """Something was left out."""
        known = reason in self.skipped or len(self.skipped) < MOST_REASONS
        key = reason if known else "other reasons"
        self.skipped[key] = self.skipped.get(key, 0) + count
        if len(self.examples) < EXAMPLES:
            self.examples.append(f"{where}: {reason}" if where else reason)

    def heard(self, speaker: Speaker) -> None:
        """Somebody spoke: a rank, or one of the processes that train."""
        if speaker.rank is not None:
            if len(self.ranks) < MOST_HEARD:
                self.ranks.add(speaker.rank)
        elif speaker.pid and len(self.workers) < MOST_HEARD and trains(speaker.role):
            self.workers.add((speaker.ip, speaker.pid))

    def odd_reward(self, what: str, where: str) -> None:
        """A sample whose reward is told and is no finite number; the sample is kept, without it."""
        self.odd_rewards[what] = self.odd_rewards.get(what, 0) + 1
        if len(self.odd_at) < EXAMPLES:
            self.odd_at.append(where)

    def odd_part(self, key: str, where: str) -> None:
        """A part of a reward that is nan or infinite, which may mean that it does not apply; told once for each part."""
        head = f"values of {key} that are nan or infinite are kept without a value"
        if not any(remark.startswith(head) for remark in self.remarks):
            self.remark(f"{head} (the first at sample {where})")

    def of(self, framework: str, version: str | None = None) -> None:
        """Whose file this is."""
        self.framework = self.framework or framework
        self.framework_version = self.framework_version or version

    def configured(self, config: Mapping[str, Any]) -> None:
        """The run's configuration, as read."""
        if not self.config:
            self.config = dict(config)

    def remark(self, text: str) -> None:
        if text not in self.remarks and len(self.remarks) < EXAMPLES * 4:
            self.remarks.append(text)
