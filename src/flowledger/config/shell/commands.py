"""What single commands do to a scope: the builtins that matter, and which commands start a training program."""

import os.path
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from flowledger.config.shell.arithmetic import ArithmeticFault, integer
from flowledger.config.shell.conditions import Truth
from flowledger.config.shell.expand import cut
from flowledger.config.shell.filters import FILTERS, echo, printf
from flowledger.config.shell.scope import Scope, Text, Variable, is_unknown, unknown
from flowledger.flow.errors import BadInput

LAUNCHERS = re.compile(r"(pypy|python)[\d.]*|torchrun|deepspeed|accelerate|ray|uv|trl|swift|llamafactory-cli")
WRAPPERS = frozenset(  # run the command that is in their words
    [
        "exec",
        "nohup",
        "command",
        "builtin",
        "time",
        "env",
        "sudo",
        "stdbuf",
        "nice",
        "ionice",
        "timeout",
        "numactl",
        "taskset",
        "setsid",
        "srun",
        "mpirun",
        "mpiexec",
        "docker",
        "podman",
        "singularity",
        "apptainer",
        "enroot",
        "poetry",
        "conda",
        "mamba",
        "micromamba",
        "pixi",
        "pipenv",
        "nsys",
        "ncu",
        "catchsegv",
        "proxychains4",
        "eatmydata",
        "torch-memory-saver",
    ]
)
SHELLS = frozenset(("bash", "sh", "zsh", "dash"))


class NotKnown(Exception):  # noqa: N818  (a fact about the script, not a fault)
    """The output of a command that only the run itself could tell."""


class Exit(Exception):  # noqa: N818
    """`exit`"""


class Return(Exception):  # noqa: N818
    """`return`"""

    def __init__(self, truth: Truth) -> None:
        super().__init__()
        self.truth = truth


class Leave(Exception):  # noqa: N818
    """`break` or `continue`, so many loops up."""

    def __init__(self, word: str, loops: int) -> None:
        super().__init__()
        self.word, self.loops = word, loops


def base(word: str) -> str:
    """The name of a command given as a path."""
    return word.rpartition("/")[2]


def is_launcher(word: str) -> bool:
    name = base(word)
    return bool(LAUNCHERS.fullmatch(name)) or (is_unknown(word) and "python" in word)


def starts_program(words: list[Text]) -> bool:
    """Whether these words start a program, and not `ray stop`, `uv pip` or the like."""
    if not words or not is_launcher(words[0].text):
        return False
    name, rest = base(words[0].text), [word.text for word in words[1:]]
    if name == "ray":
        return rest[:2] == ["job", "submit"]
    if name == "uv":
        return rest[:1] == ["run"]
    return bool(rest)


def unwrapped(words: list[Text]) -> list[Text]:
    """The words from the program on, past `nohup`, `env A=1`, `srun --nodes 2` and their like."""
    while words and base(words[0].text) in WRAPPERS:
        rest = words[1:]
        inner = next((n for n, w in enumerate(rest) if is_inner(w.text)), None)
        if inner is None:
            plain_prefix = words[0].text in ("exec", "command", "builtin", "nohup", "time")
            return rest if plain_prefix and rest else words
        words = rest[inner:]
    return words


def is_inner(word: str) -> bool:
    return is_launcher(word) or base(word) in SHELLS or base(word) in WRAPPERS


def assigned_by_env(words: list[Text]) -> dict[str, str]:
    """`env A=1 B=2 python3 …`: what it adds to the environment."""
    found: dict[str, str] = {}
    seen = False
    for word in words:
        if is_launcher(word.text) or base(word.text) in SHELLS:
            break
        seen |= base(word.text) == "env"
        if seen and re.match(r"[A-Za-z_]\w*=", word.text):
            name, _, value = word.text.partition("=")
            found[name] = value
    return found


def output_of(name: str, words: list[str], text: str, scope: Scope) -> str | None:
    """What a command prints, given its input; None where that is not known."""
    if any(is_unknown(word) for word in words) and name not in ("echo", "printf", "dirname", "basename"):
        return None
    if name == "echo":
        return echo(words)
    if name == "printf":
        return printf(words)
    if name == "pwd":
        return f"{scope.directory}\n"
    if name in FILTERS and not is_unknown(text):
        return FILTERS[name](words, text, scope.directory)
    return None


def change_directory(scope: Scope, words: list[str]) -> Truth:
    """Taken to succeed: the directories of a script are those of the machine that will run it."""
    given = [word for word in words if word not in ("--", "-P", "-L", "-e")]
    target = given[0] if given else scope.scalar("HOME") or "/"
    if target == "-":
        target = scope.scalar("OLDPWD") or str(scope.directory)
    place = Text(str(scope.directory), scope.file)
    scope.assign("OLDPWD", place)
    scope.directory = Path(os.path.normpath(scope.directory / target))
    scope.assign("PWD", Text(str(scope.directory), scope.file))
    return True


def shift(scope: Scope, words: list[str]) -> Truth:
    count = int(words[0]) if words and words[0].isdigit() else 1
    if count > len(scope.arguments):
        return False
    scope.arguments = scope.arguments[count:]
    return True


def set_arguments(scope: Scope, words: list[Text]) -> Truth:
    """`set -- a b` and `set a b`; options such as `-euo pipefail` change nothing here."""
    texts = [word.text for word in words]
    if "--" in texts:
        scope.arguments = words[texts.index("--") + 1 :]
    elif texts and texts[0][:1] not in ("-", "+"):
        scope.arguments = words
    return True


def unset(scope: Scope, words: list[str], arithmetic: Callable[[str], str]) -> Truth:
    for word in words:
        match = re.fullmatch(r"([A-Za-z_]\w*)\[(.+)\]", word)
        name = match.group(1) if match else word
        variable = scope.variables.get(name)
        if match and variable:
            key = match.group(2) if variable.kind == "map" else arithmetic(match.group(2))
            scope.variables[name] = replace(variable, items={k: v for k, v in variable.items.items() if k != key})
        elif not word.startswith("-"):
            scope.variables.pop(word, None)
            scope.functions.pop(word, None)
    return True


def read_into(scope: Scope, words: list[str], text: str | None, place: str, ifs: str) -> Truth:
    """`read -r A B <<< text`; without a text that is known the names hold something unknown."""
    names, array = [], None
    at = 0
    while at < len(words):
        word = words[at]
        if word.startswith("-") and len(word) > 1:
            if word.endswith("a") and at + 1 < len(words):
                array = words[at + 1]
            at += 2 if word[-1] in "adinNptu" else 1
        else:
            names.append(word)
            at += 1
    line = None if text is None else text.split("\n")[0]
    for name in [array] if array else names or ["REPLY"]:
        scope.assign(name, Text(unknown(f"$(read {name})"), place))
    if line is None:
        return None
    if array:
        parts = [part for part in cut(line, ifs) if part is not None]
        scope.variables[array] = Variable({str(n): Text(p, place) for n, p in enumerate(parts)}, "array")
        return True
    for n, name in enumerate(names or ["REPLY"]):
        last = n == len(names) - 1 or not names
        head, line = (line.strip(" \t\n"), "") if last else _first(line, ifs)
        scope.assign(name, Text(head, place))
    return True


def _first(line: str, ifs: str) -> tuple[str, str]:
    blanks = "".join(letter for letter in ifs if letter in " \t\n")
    line = line.lstrip(blanks) if blanks else line
    at = next((n for n, letter in enumerate(line) if letter in ifs), len(line))
    rest = line[at:]
    rest = rest.lstrip(blanks) if blanks else rest
    return line[:at], rest[1:] if rest[:1] in ifs and rest[:1] not in blanks and rest else rest


def let(scope: Scope, words: list[str], place: str) -> Truth:
    value = 0
    for word in words:
        try:
            value = integer(
                word, lambda name: scope.scalar(name) or "", lambda n, v: scope.assign(n, Text(str(v), place))
            )
        except ArithmeticFault as fault:
            raise BadInput(f"{place}: let {word}: {fault}") from None
    return value != 0


def leave(word: str, words: list[str]) -> Truth:
    raise Leave(word, int(words[0]) if words and words[0].isdigit() else 1)


QUIET: Mapping[str, Truth] = {  # builtins and tools that change nothing a launch depends on
    ":": True,
    "true": True,
    "false": False,
    "wait": True,
    "sleep": True,
    "trap": True,
    "shopt": True,
    "ulimit": True,
    "mkdir": True,
    "umask": True,
    "hash": True,
    "echo": True,
    "printf": True,
    "pwd": True,
}
