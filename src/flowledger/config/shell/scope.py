"""What a shell script knows at one point of its run: variables, arguments, functions, directory, and what it lacks.

A value that only a run could tell (`$(nvidia-smi …)`) is carried as its own text between two private marks: such text is
never split into words, and a condition that meets it stays undecided.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from flowledger.flow.errors import BadInput

OPEN, CLOSE = "\ue010", "\ue011"  # around text that stands for a value nobody knows before the run
BLANKS = {" ": "\ue000", "\t": "\ue001", "\n": "\ue002"}
IFS = " \t\n"
LONGEST_VALUE = 1 << 17  # MAX_ARG_STRLEN of Linux
MOST_EXPANDED = 1 << 23
ASSUMED = "--assume"  # the place of a variable that it gives


@dataclass(frozen=True, slots=True)
class Text:
    """Characters, and `file:line` of where they were written."""

    text: str
    place: str
    missing: frozenset["Missing"] = frozenset()  # what was not set when this word was made


@dataclass(frozen=True, slots=True)
class Missing:
    """A variable that was read and is not set."""

    name: str
    place: str


@dataclass(frozen=True, slots=True)
class Variable:
    """A scalar is the element `0`; arrays have their indices as keys, maps (`declare -A`) words."""

    items: Mapping[str, Text]
    kind: Literal["scalar", "array", "map"] = "scalar"
    missing: frozenset[Missing] = frozenset()  # what was not set when the value was made
    exported: bool = False

    @property
    def values(self) -> list[Text]:
        return [self.items[key] for key in self.keys]

    @property
    def keys(self) -> list[str]:
        return sorted(self.items, key=int) if self.kind != "map" else list(self.items)


@dataclass(slots=True)
class Command:
    """One simple command after expansion, as bash would hand it to `execve`."""

    words: list[Text]
    environment: dict[str, str]
    missing: frozenset[Missing]
    place: str


@dataclass(slots=True)
class Found:
    """What one reading gathers, in all subshells together."""

    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # conditions and files that could not be known
    statements: int = 0  # run so far, bounded
    spent: int = 0  # characters that were expanded so far, bounded
    assumed: Mapping[str, str] = field(default_factory=dict)  # variables of --assume
    used: set[str] = field(default_factory=set)  # those of them that were read
    holders: dict[str, str] = field(default_factory=dict)  # text that nobody knows -> the variable that holds it
    ended: str | None = None  # where an `exit` was met

    def spend(self, characters: int, place: str) -> None:
        """Raises BadInput where a script expands more than any launch does, as one that doubles a variable in a loop."""
        self.spent += characters
        if self.spent > MOST_EXPANDED:
            raise BadInput(
                f"{place}: its words expand to more than {MOST_EXPANDED >> 20} million characters; does a variable double?"
            )


@dataclass(slots=True)
class Scope:
    """Mutable; `fork` gives the scope of a subshell."""

    file: str
    directory: Path
    found: Found
    variables: dict[str, Variable] = field(default_factory=dict)
    arguments: list[Text] = field(default_factory=list)
    functions: dict[str, Any] = field(default_factory=dict)  # name -> (tree node, source, file)
    missing: set[Missing] = field(default_factory=set)  # met since it was last cleared
    locals: list[dict[str, Variable | None]] = field(default_factory=list)  # what to put back at the end of a function
    input: str | None = None  # of a pipeline inside `$(…)`, or of `<<<`
    output: list[str] | None = None  # inside `$(…)`: what was printed
    depth: int = 0  # of functions, substitutions and sourced files

    def fork(self, output: list[str] | None = None) -> "Scope":
        return Scope(
            file=self.file,
            directory=self.directory,
            found=self.found,
            variables=dict(self.variables),
            arguments=list(self.arguments),
            functions=dict(self.functions),
            missing=self.missing,
            input=self.input,
            output=self.output if output is None else output,
            depth=self.depth + 1,
        )

    def scalar(self, name: str) -> str | None:
        variable = self.variables.get(name)
        first = variable.items.get("0") if variable else None
        return first.text if first else None

    @property
    def ifs(self) -> str:
        own = self.scalar("IFS")
        return IFS if own is None else own

    def assign(self, name: str, value: Text, *, missing: frozenset[Missing] = frozenset(), key: str = "0") -> None:
        """Set one element, keeping the others of an array. What --assume gives stands above what nobody knows."""
        if len(value.text) > LONGEST_VALUE:
            raise BadInput(
                f"{value.place}: {name} has {len(value.text)} characters, and the kernel takes no word of more than "
                f"{LONGEST_VALUE}; does it double in a loop?"
            )
        if is_unknown(value.text):
            if name in self.found.assumed:
                self.found.used.add(name)
                value = Text(self.found.assumed[name], value.place)
            for text in unknowns_in(value.text):
                self.found.holders.setdefault(text, name)
        old = self.variables.get(name)
        if old is None or (old.kind == "scalar" and key == "0"):
            kind: Literal["scalar", "array", "map"] = "scalar" if key == "0" else "array"
            self.variables[name] = Variable({key: value}, kind, missing, bool(old and old.exported))
            return
        kind = "array" if old.kind == "scalar" else old.kind
        self.variables[name] = replace(old, items={**old.items, key: value}, kind=kind, missing=old.missing | missing)

    def export(self, name: str) -> None:
        """Also of a name without a value: it is exported as soon as it has one."""
        self.variables[name] = replace(self.variables.get(name, Variable({})), exported=True)

    def hide(self, name: str) -> None:
        """`local NAME`: remember what the caller had."""
        if self.locals:
            self.locals[-1].setdefault(name, self.variables.get(name))

    def restore(self, kept: Mapping[str, Variable | None]) -> None:
        """Put back what stood before; None: nothing did."""
        for name, variable in kept.items():
            if variable is None:
                self.variables.pop(name, None)
            else:
                self.variables[name] = variable

    def environment(self) -> dict[str, str]:
        return {name: v.items["0"].text for name, v in self.variables.items() if v.exported and "0" in v.items}


def unknown(text: str) -> str:
    """Text that stands for a value nobody knows; its blanks do not separate words."""
    inner = text.replace(OPEN, "").replace(CLOSE, "")
    return OPEN + "".join(BLANKS.get(letter, letter) for letter in inner) + CLOSE


def is_unknown(text: str) -> bool:
    return OPEN in text


def plain(text: str) -> str:
    """The text as a user wrote it, without the marks."""
    for blank, mark in BLANKS.items():
        text = text.replace(mark, blank)
    return text.replace(OPEN, "").replace(CLOSE, "")


def unknowns_in(text: str) -> list[str]:
    return [plain(part.split(CLOSE)[0]) for part in text.split(OPEN)[1:]]
