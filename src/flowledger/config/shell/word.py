"""A word of a command line as it reaches the program, with what it lacks: values of the run, variables that are not set."""

from collections.abc import Sequence
from dataclasses import dataclass

from flowledger.config.shown import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Why a word is not known as it stands."""

    unknown: tuple[str, ...] = ()  # `$(nvidia-smi -L | wc -l)`: only the run could tell
    unset: tuple[tuple[str, str], ...] = ()  # (name, place) of variables that were read and are not set
    variables: tuple[str, ...] = ()  # those that hold one of `unknown`

    def reason(self, place: str, key: str, value: object, *, spelt: str | None = None) -> str:
        """One line: what is not known of a key's value, and what to give. `spelt`: the key as `--assume` takes it."""
        if self.unset:
            name, where = self.unset[0]
            names = ", ".join(_spelt(one) for one, _ in self.unset)
            are = "is" if len(self.unset) == 1 else "are"
            way = f"{_way(name)}" if _is_argument(name) else f"{_way(name)} or export it"
            return f"{where}: {names} {are} not set ({key} = {shown(key, value)!r}); give {way}"
        assumed = self.variables[0] if self.variables else spelt or key
        return (
            f"{place}: {key} = {_short(str(value))} is not known before the run; give {spelt or key}=N "
            f"or --assume {assumed}=N"
        )


NO_GAP = Gap()


class Word(str):
    """Text with its gap. What is cut out of it is plain text again. A place may be a Word: the gap is then its value's."""

    gap: Gap
    place: str

    def __new__(cls, text: str, gap: Gap = NO_GAP, place: str = "") -> "Word":
        made = super().__new__(cls, text)
        made.gap, made.place = gap, place
        return made


def left_open(unset: Sequence[tuple[str, str]], unknown: Sequence[str]) -> list[str]:
    """What a reader notes of a command line: variables that are not set, and what only the run could tell."""
    lines = [f"{where}: {_spelt(name)} is not set; give {_way(name)}" for name, where in unset if name not in "@*"]
    return [*lines, *(f"{text} is not known before the run" for text in unknown)]


def _is_argument(name: str) -> bool:
    return name.isdigit() or name in "@*"


def _spelt(name: str) -> str:
    return f"${name}" if _is_argument(name) else name


def _way(name: str) -> str:
    return "--arg VALUE" if _is_argument(name) else f"--assume {name}=…"


def vanished(unset: Sequence[tuple[str, str]], place: str) -> Gap | None:
    """What an unquoted variable leaves that is not set: no word at all. It was read where its flag stands."""
    here = tuple(one for one in unset if one[1] == place)
    return Gap(unset=here) if here else None


def marked(place: str, gap: Gap | None) -> str:
    """A place that carries the gap of the value that stands there."""
    return place if gap is None else Word(place, gap, place)


def gap_of(text: object) -> Gap | None:
    """What a word lacks; None where it is whole."""
    return text.gap if isinstance(text, Word) and (text.gap.unknown or text.gap.unset) else None


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}…"
