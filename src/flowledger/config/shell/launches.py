"""A bash launch script as it stands, and the command lines it would run. Nothing is executed.

The script is parsed with tree-sitter-bash; words are cut and expanded by our own rules, and control flow is followed as far
as its conditions are known. What only the run could tell (`$(nvidia-smi …)`) is kept as text and named; a condition on it
counts as false. The time of the run is taken to be 2000-01-01 12:00 UTC. Path names are not expanded (`*` stays).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowledger.config.shell.commands import Exit, Leave, Return
from flowledger.config.shell.control import HANDLERS
from flowledger.config.shell.scope import ASSUMED, Command, Found, Scope, Text, Variable, plain, unknowns_in
from flowledger.config.shell.simple import simple
from flowledger.config.shell.statements import Script, Walker
from flowledger.config.shell.word import Gap, Word
from flowledger.flow.errors import BadInput

LARGEST = 1 << 20  # bytes; a launch script has a few thousand


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """One command that starts a program, as it would reach `execve`; wrappers such as `nohup` and `srun` are taken off."""

    argv: tuple[str, ...]  # a Word where something of it is not known
    places: tuple[str, ...]  # `run.sh:31` of each word: where it was written
    line: int  # of the command
    file: str
    unset: tuple[tuple[str, str], ...] = ()  # (name, place) of variables that were read, are not set, and reach a word
    unknown: tuple[str, ...] = ()  # `$(…)` texts that stand in a word
    assumed: tuple[str, ...] = ()  # names of --assume that an expansion of the script used
    environment: Mapping[str, str]  # what the script exports or puts before the command
    notes: tuple[str, ...] = ()  # conditions and files that could not be known


def launches(
    path: str | Path,
    argv: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    assumed: Mapping[str, str] | None = None,
) -> list[Launched]:
    """The programs that `variables… bash path argv…` would start, in order; never empty.

    `assumed` are variables too, and stand above what a script assigns where that is not known before the run.

    Raises BadInput with `file:line` for what is no bash, for a variable that the script itself demands (`${X:?}`), and for a
    script that starts nothing.
    """
    file, assumed = str(path), assumed or {}
    given = {**(variables or {}), **assumed}
    source = read_script(Path(path))
    found = Found(assumed=assumed)
    scope = Scope(file=file, directory=Path.cwd(), found=found, arguments=[Text(word, "command line") for word in argv])
    outside = {"HOME": str(Path.home()), "PWD": str(Path.cwd()), "BASH_VERSION": "5.2", **given}
    for name, value in outside.items():
        scope.variables[name] = Variable(
            {"0": Text(value, ASSUMED if name in assumed else "environment")}, exported=True
        )
    try:
        Walker(simple, HANDLERS).run(Script(source, file), scope)
    except (Exit, Leave, Return):
        pass
    except RecursionError:
        raise BadInput(f"{file}: its commands nest too deeply to be followed") from None
    if not found.commands:
        raise BadInput(_nothing(file, found))
    return [_launched(command, found, outside) for command in found.commands]


def read_script(path: Path) -> bytes:
    """The bytes of a script. Raises BadInput for what a shell would not read."""
    try:
        source = path.read_bytes()
    except IsADirectoryError:
        raise BadInput(f"{path} is a directory; give the script in it") from None
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None
    except ValueError:
        raise BadInput(f"{str(path)!r} is no path") from None
    if len(source) > LARGEST:
        raise BadInput(f"{path} has {len(source)} bytes; a launch script has at most {LARGEST}")
    if b"\0" in source:
        raise BadInput(f"{path} is a binary file, not a script")
    if source.startswith(b"\xef\xbb\xbf"):
        raise BadInput(
            f"{path}:1: begins with a byte-order mark, which bash takes for a command; save it as UTF-8 without BOM"
        )
    if b"\r\n" in source:
        line = source[: source.index(b"\r\n")].count(b"\n") + 1
        raise BadInput(
            f"{path}:{line}: ends with CR LF, and bash takes the CR for part of a word; convert it (dos2unix)"
        )
    try:
        text = source.decode()
    except UnicodeDecodeError as error:
        line = source[: error.start].count(b"\n") + 1
        raise BadInput(f"{path}:{line}: byte {source[error.start]:#04x} is no UTF-8; save it as UTF-8") from None
    if not text.strip():
        raise BadInput(f"{path} is empty")
    return source


def flags(launched: Launched, start: int = 0) -> dict[str, list[tuple[str | None, str]]]:
    """`--name value`, `--name=value` and bare `--name` among the words from `start` on: name -> [(value, place)].

    A flag that takes several words (`--betas 0.9 0.95`) has an entry for each; a bare one has the value None.
    """
    found: dict[str, list[tuple[str | None, str]]] = {}
    name = None
    for word, place in zip(launched.argv[start:], launched.places[start:], strict=True):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            found.setdefault(name, []).append((value if equals else None, place))
            name = None if equals else name
        elif name is not None:
            last = found[name]
            if last[-1][0] is None:
                last[-1] = (word, place)
            else:
                last.append((word, place))
    return found


def _launched(command: Command, found: Found, given: Mapping[str, str]) -> Launched:
    texts = [word.text for word in command.words]
    unknown = dict.fromkeys(part for text in texts for part in unknowns_in(text))
    missing = sorted(command.missing, key=lambda one: (one.place, one.name))
    own = {name: plain(value) for name, value in command.environment.items() if given.get(name) != value}
    own.pop("PWD", None)
    own.pop("OLDPWD", None)
    return Launched(
        argv=tuple(_word(word, found) for word in command.words),
        places=tuple(word.place for word in command.words),
        line=int(command.place.rpartition(":")[2]),
        file=command.place.rpartition(":")[0],
        unset=tuple((one.name, one.place) for one in missing),
        unknown=tuple(unknown),
        assumed=tuple(name for name in found.assumed if name in found.used),
        environment=own,
        notes=tuple(found.notes),
    )


def _word(word: Text, found: Found) -> str:
    unknown = tuple(dict.fromkeys(unknowns_in(word.text)))
    unset = tuple((one.name, one.place) for one in sorted(word.missing, key=lambda one: (one.place, one.name)))
    if not unknown and not unset:
        return plain(word.text)
    holders = tuple(dict.fromkeys(found.holders[text] for text in unknown if text in found.holders))
    return Word(plain(word.text), Gap(unknown=unknown, unset=unset, variables=holders), word.place)


def _nothing(file: str, found: Found) -> str:
    why = f"; it ends at {found.ended}" if found.ended else ""
    if found.notes:
        why += f" ({found.notes[-1]})"
    return f"{file}: starts no program (python, torchrun, accelerate, deepspeed, ray job submit, …){why}; give arguments or --assume"
