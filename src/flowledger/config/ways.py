"""Settings that would work in place of those that do not, found by trying them: what is proposed passes every rule."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from flowledger.config.section import Section
from flowledger.flow.errors import BadInput

if TYPE_CHECKING:
    from flowledger.config.schema import RunConfig

S = TypeVar("S", bound=Section)
Changes = Mapping[str, Any]  # dotted key -> value
MOST_PROCESSES = 1024  # that --nproc starts


class Fault(BadInput):
    """A rule that is broken, and `ways` out: of each the first that works is said, joined by `or`.

    Where none of them works, the first of `otherwise` that does; where none does, something else is wrong too, and the
    first of all is said.
    """

    def __init__(self, text: str, *ways: Iterable[Changes], otherwise: Iterable[Changes] = ()) -> None:
        super().__init__(text)
        self.ways, self.otherwise = ways, otherwise


def told(fault: Fault, config: "RunConfig", processes: int, works: Callable[["RunConfig", Changes], bool]) -> BadInput:
    """The fault as a user reads it: with the nearest settings that work, and the processes that go with them."""
    ways = [list(way) for way in fault.ways]
    found = [next((one for one in way if works(config, one)), None) for way in ways]
    good = [one for one in found if one is not None] or [one for one in fault.otherwise if works(config, one)][:1]
    good = good or [way[0] for way in ways if way][:1]
    return BadInput(f"{fault}; use {' or '.join(_said(config, one, processes) for one in good)}")


def changed(config: "RunConfig", changes: Changes) -> "RunConfig":
    """The same configuration with other values."""
    for key, value in changes.items():
        config = _with(config, key.split("."), value)
    return config


def nearest(number: int, candidates: Iterable[int]) -> list[int]:
    """Candidates, the nearest first; the smaller of two."""
    return sorted(candidates, key=lambda one: (abs(one - number), one))


def divisors(number: int) -> list[int]:
    """All divisors of a positive number."""
    return [one for one in range(1, number + 1) if number % one == 0]


def world(config: "RunConfig") -> int:
    """Processes that the mesh asks for."""
    return config.mesh.dp * config.mesh.model


def _with(section: S, parts: Sequence[str], value: Any) -> S:
    name, *rest = parts
    inner = _with(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})


def _said(config: "RunConfig", changes: Changes, processes: int) -> str:
    """`mesh.dp = 4 and --nproc 4`."""
    settings = [f"{key} = {_spelt(value)}" for key, value in changes.items()]
    asked = world(changed(config, changes))
    return " and ".join([*settings, *([f"--nproc {asked}"] if asked != processes else [])])


def _spelt(value: Any) -> str:
    return "null" if value is None else str(list(value)) if isinstance(value, tuple) else str(value)
