"""What somebody reports, whatever its form: the framework, the model, the machines, settings, a symptom, numbers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report as it came. `config` and `measured` keep the reporter's own keys; nothing is guessed here."""

    framework: str = ""
    model: str = ""
    hardware: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    symptom: str = ""
    measured: Mapping[str, Any] = field(default_factory=dict)
    stage: str = ""  # in which it died, where a traceback or a function's name says so
    planned: Mapping[str, Any] = field(default_factory=dict)  # facts that a plan of it came to, where one was made

    def said(self) -> str:
        """What the reporter wrote of the symptom, and what stands as text among the numbers."""
        words = (f"{key}: {value}" for key, value in leaves(self.measured) if isinstance(value, str))
        return "\n".join((self.symptom, *words))

    def settings(self) -> str:
        """The configuration, one `key = value` a line."""
        return "\n".join(f"{key} = {value}" for key, value in leaves(self.config))

    def whole(self) -> str:
        """Everything that is said, for words that may stand anywhere."""
        return "\n".join((self.said(), self.settings(), self.framework, self.model, self.hardware))


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each leaf; a list is one leaf."""
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from leaves(value, name)
        else:
            yield name, value
