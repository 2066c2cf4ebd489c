"""What an alarm sees at one step: the numbers of the job and of its ranks, and what is known of the run at any time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowledger.ledger.manifest import value_at

Value = float | int | bool | str | None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a run says of itself once: its configuration, the sizes of symbols, and what was planned."""

    config: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    planned: Mapping[str, float] = field(default_factory=dict)

    @property
    def keys(self) -> set[str]:
        """The dotted keys of all settings that are no section."""
        return set(_keys(self.config))

    def setting(self, key: str) -> Value:
        """The setting with this dotted key; None where there is none, or it is a section."""
        found = value_at(self.config, key)
        return found if isinstance(found, float | int | bool | str) else None


def _keys(config: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{before}{key}.")
        else:
            yield f"{before}{key}"


@dataclass(frozen=True, slots=True)
class Moment:
    """The numbers of one step."""

    step: int
    job: Mapping[str, float]
    ranks: Mapping[str, Mapping[int, float]]
    facts: Facts


Evaluated = Callable[[list[Value], Moment], Value]
