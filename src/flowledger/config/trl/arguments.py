"""The arguments of a TRL run as they were given: a YAML file of TrlParser, or `accelerate launch … --flags`.

`accelerate launch --config_file zero3.yaml grpo.py --config run.yaml --beta 0.04`: the launcher's own options are kept
under `accelerate.`, the script's under their names. The command line counts above the file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flowledger.config.dotted import flat
from flowledger.config.settings import table
from flowledger.config.shell import word as shell
from flowledger.config.shell.launches import Launched
from flowledger.config.shell.word import gap_of, marked, vanished
from flowledger.config.shown import shown_setting
from flowledger.config.trl import accelerate
from flowledger.config.yaml_text import COMMAND_LINE, document, text_of
from flowledger.flow.errors import BadInput

Word = tuple[str, str]  # what was written, and where
TORCHRUN = {"nproc_per_node": "num_processes", "nproc-per-node": "num_processes", "nnodes": "num_machines"}
ALONE = ("standalone", "no_python", "no-python")  # options of torchrun without a value


@runtime_checkable
class Command(Protocol):
    """One command line of a script: its words, and for each the place where it stands."""

    @property
    def argv(self) -> Sequence[str]: ...

    @property
    def places(self) -> Sequence[Any]: ...


@dataclass(slots=True)
class Given:
    """Values by key with their places. `launch`: the launcher's. `own_script`: a script with keys of its own may run."""

    where: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    launch: dict[str, Any] = field(default_factory=dict)
    launch_places: dict[str, str] = field(default_factory=dict)
    own_script: bool = False
    launcher: str | None = None  # accelerate, torchrun, trl, python; null: only a file is known
    folder: Path = field(default_factory=Path)
    unset: Sequence[tuple[str, str]] = ()  # (name, place) of variables of the script that are not set

    def say(self, key: str, value: Any, place: str) -> None:
        self.values[key], self.places[key] = value, place

    def say_launch(self, key: str, value: Any, place: str) -> None:
        self.launch[key], self.launch_places[key] = value, place


def given(source: Path | str | Command | None, overrides: Sequence[str]) -> Given:
    """Everything that was given, the launcher's options taken apart. Raises BadInput."""
    if source is None:
        found = Given(where=COMMAND_LINE)
    elif isinstance(source, str | Path):
        found = Given(where=str(source), folder=Path(source).parent)
        _read_file(found, Path(source))
    else:
        found = _command(source)
    for override in overrides:
        key, equals, text = override.lstrip("-").partition("=")
        if not equals or not key:
            raise BadInput(
                f"{COMMAND_LINE}: {shown_setting(override)!r} is no setting; write key=value, such as num_generations=8"
            )
        found.say(_name(key), _scalar(text), COMMAND_LINE)
    _take_launch_keys(found)
    return found


def _read_file(found: Given, path: Path) -> None:
    value, marks, line = document(text_of(path), str(path))
    if not isinstance(value, dict):
        raise BadInput(f"{path}:{line or 1}: expected `key: value` lines, found {type(value).__name__}")
    for key, inner in value.items():
        if key == "env":  # environment variables that TrlParser sets
            for name in flat({"env": inner}):
                found.say(name, flat({"env": inner})[name], marks.get(name, str(path)))
        else:
            found.say(str(key), inner, marks.get(str(key), str(path)))


def _command(source: Command) -> Given:
    words = list(zip(source.argv, map(str, source.places), strict=False))
    first = words[0][1] if words else COMMAND_LINE
    file = first.rpartition(":")[0] or first
    found = Given(
        where=file,
        folder=Path(file).parent if file != COMMAND_LINE else Path(),
        unset=source.unset if isinstance(source, Launched) else (),
    )
    rest = _launcher(found, words)
    flags = dict(_flags(rest, found.unset))
    config = flags.pop("config", None)
    if config is not None:
        _read_file(found, accelerate.found_file(str(config[0]), found.folder, config[1]))
    for key, (value, place) in flags.items():
        found.say(key, value, place)
    return found


def _launcher(found: Given, words: list[Word]) -> list[Word]:
    """The words that are the script's; the launcher's go into `found`."""
    names = [Path(word).name for word, _ in words]
    for at, name in enumerate(names):
        if name == "trl":
            found.launcher = "trl"
            return words[at + 2 :]
        if name == "launch" and at and names[at - 1].startswith("accelerate"):
            return _options(found, words[at + 1 :], "accelerate")
        if name == "torchrun" or name == "torch.distributed.run":
            return _options(found, words[at + 1 :], "torchrun")
        if name.startswith("-") and at == 0:
            return words
        if name.endswith(".py"):
            found.launcher, found.own_script = "python", not _is_trls(words[at][0])
            return words[at + 1 :]
    return words


def _options(found: Given, words: list[Word], launcher: str) -> list[Word]:
    """Options of accelerate or torchrun up to the script."""
    found.launcher = launcher
    flags = {*table("trl")["launch"]["flags"], *ALONE}
    at = 0
    while at < len(words):
        word, place = words[at]
        name, equals, inline = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("-") or name in ("m", "module"):
            script = words[at + 1][0] if name in ("m", "module") and at + 1 < len(words) else word
            found.own_script = not _is_trls(script)
            if launcher == "torchrun" and "num_machines" in found.launch:  # nproc_per_node counts those of one node
                nodes = str(found.launch["num_machines"]).partition(":")[0]
                found.launch["num_machines"] = int(nodes) if nodes.isdecimal() else nodes
                if isinstance(found.launch.get("num_processes"), int) and nodes.isdecimal():
                    found.launch["num_processes"] *= int(nodes)
            return words[at + (2 if name in ("m", "module") else 1) :]
        gap = gap_of(word)
        if name in flags:
            value: Any = True
        elif equals:
            value = inline if gap is not None else _scalar(inline)
        elif (gone := vanished(found.unset, place)) is not None and _is_no_value(words[at + 1 : at + 2]):
            value, gap = "", gone
        else:
            at += 1
            value = _scalar(words[at][0]) if at < len(words) else None
            gap = gap_of(words[at][0]) if at < len(words) else None
        place = marked(place, gap)
        found.say_launch(TORCHRUN.get(name, name) if launcher == "torchrun" else name, value, place)
        at += 1
    return []


def _is_no_value(following: list[Word]) -> bool:
    """Whether the next word is the script or another option, so that this option's own value is gone."""
    return not following or following[0][0].endswith(".py") or following[0][0].startswith("-")


def _is_trls(script: str) -> bool:
    return script.replace(".", "/").endswith(("trl/scripts/grpo/py", "trl/scripts/grpo"))


def _flags(words: list[Word], unset: Sequence[tuple[str, str]]) -> Iterator[tuple[str, tuple[Any, str]]]:
    """`--key value`, `--key=value`, `--key a b c`, `--switch`, `--no_switch`, as argparse and HfArgumentParser take them."""
    known = table("trl")["defaults"]
    at = 0
    while at < len(words):
        word, place = words[at]
        if not word.startswith("--"):
            raise BadInput(f"{place}: {word!r} stands alone; an argument is written --key value")
        name, equals, inline = word[2:].partition("=")
        key = _name(name)
        at += 1
        values = [_whole(word, inline)] if equals else []
        while not equals and at < len(words) and not words[at][0].startswith("--"):
            values.append(words[at][0])
            at += 1
        gap = next(filter(None, map(gap_of, values)), None) or (None if values else vanished(unset, place))
        place = marked(place, gap)
        if not values and key.startswith("no_") and key[3:] in known and key not in known:
            yield key[3:], (False, place)
        elif len(values) == 1:
            yield key, (_scalar(values[0]), place)
        else:
            yield key, ([_scalar(value) for value in values] if values else True, place)


def _name(key: str) -> str:
    return key.strip().lstrip("-").replace("-", "_")


def _whole(word: str, inline: str) -> str:
    gap = gap_of(word)
    return inline if gap is None else shell.Word(inline, gap)


def _scalar(text: str) -> Any:
    gap = gap_of(text)
    if gap is not None and gap.unknown:
        return str(text)
    try:
        return document(text, COMMAND_LINE)[0] if text.strip() else ""
    except BadInput:
        return text  # a path or a pattern that YAML would read as something else


def _take_launch_keys(found: Given) -> None:
    """Under `trl grpo` what the trainer does not know goes to `accelerate launch`; so do its keys in a YAML file."""
    if found.launcher not in (None, "trl"):
        return  # the launcher has its own words already
    launch = table("trl")["launch"]
    own: Mapping[str, Any] = {**table("trl")["defaults"], **dict.fromkeys(table("trl")["unset"])}
    names = {*launch["flags"], *launch["options"], "accelerate_config", "config_file"}
    for key in [key for key in found.values if key in names and key not in own]:
        found.say_launch(key, found.values.pop(key), found.places.pop(key))
