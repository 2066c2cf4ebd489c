"""A problem: what is asked, what the answer is, and where both come from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """One problem. `messages` holds the chat where the prompt is one; `text` is then its contents in a row."""

    text: str
    answer: Any  # None where the data has none
    index: int  # of the record in its file, or of the problem in its task
    extra: Mapping[str, Any] = field(default_factory=dict)  # the record's other keys
    messages: tuple[Mapping[str, str], ...] | None = None
    where: str = ""  # file:line or task[index], for messages
