"""What an import learns beside rows: whose run it is, how it was configured, and what could not be read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EXAMPLES = 5  # places that are named; the others are counted
MOST_REASONS = 100


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

    def skip(self, reason: str, where: str = "", count: int = 1) -> None:
        """Something was left out."""
        known = reason in self.skipped or len(self.skipped) < MOST_REASONS
        key = reason if known else "other reasons"
        self.skipped[key] = self.skipped.get(key, 0) + count
        if len(self.examples) < EXAMPLES:
            self.examples.append(f"{where}: {reason}" if where else reason)

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
