"""Where a verl configuration comes from: a command line, overrides, or a YAML file, each turned into one Launch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowledger.config.dotted import flat
from flowledger.config.shell.launches import Launched
from flowledger.config.shell.word import gap_of, left_open
from flowledger.config.yaml_text import COMMAND_LINE, Marks, document, text_of
from flowledger.flow.errors import BadInput, nearest
from flowledger.tables import verl

_VALUED = {  # Hydra's flags that take a value
    "--config-name": "name", "-cn": "name", "--config-path": "path", "-cp": "path", "--config-dir": "dir", "-cd": "dir",
    "--package": "package", "-p": "package", "--cfg": "cfg", "-c": "cfg", "--experimental-rerun": "rerun",
}  # fmt: skip
_VERLS_FOLDER = re.compile(
    r"(?:(?:.*/)?(?:trainer|experimental/\w+|recipe/\w+)/)?config"
)  # `config`: beside the module
_MODULE_FILE = re.compile(r"(?:.*/)?((?:verl|recipe)/.*)\.py")
ASSUMED = "--assume"


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of verl: the module, the configuration name where one is given, and the overrides with their places."""

    module: str = verl.DEFAULT_MODULE
    config_name: str | None = None
    overrides: tuple[tuple[str, str], ...] = ()  # text, `file:line` or an empty string
    whole: Mapping[str, Any] = field(default_factory=dict)  # leaves of a file that are set before any override
    marks: Mapping[str, str] = field(default_factory=dict)  # where they stand
    strict: bool = False  # leaves of the file may only be known keys
    where: str = COMMAND_LINE
    environment: Mapping[str, str] = field(default_factory=dict)  # what the script exports
    notes: tuple[str, ...] = ()  # what could not be known of the command line
    file: Path | None = None  # the user's own configuration, which Hydra would load; `whole` holds its leaves
    left_out: tuple[str, ...] = ()  # what of that file only Hydra over verl's own files could compose

    @property
    def config(self) -> str:
        """The configuration that is loaded. Raises BadInput for an unknown module."""
        given = self.config_name
        return given.removesuffix(".yaml") if given else verl.config_of(self.module)


def of_command(launched: Launched) -> Launch:
    """The launch of a command line such as `python3 -m verl.trainer.main_ppo --config-name x a.b=1`."""
    words = list(zip(launched.argv, launched.places, strict=False))
    where = f"{launched.file}:{launched.line}"
    module, rest = _module(words, where)
    overrides: list[tuple[str, str]] = []
    flags: dict[str, str] = {}
    waiting = iter(rest)
    for word, place in waiting:
        flag, equals, value = word.partition("=")
        if flag in _VALUED:
            flags[_VALUED[flag]] = value if equals else next(waiting, ("", ""))[0]
        elif not word.startswith("-") and not _is_unknown(word):
            overrides.append((word, place))
    config_name = flags.get("name")
    notes = (*launched.notes, *left_open(launched.unset, launched.unknown))
    launch = Launch(
        module, config_name, tuple(overrides), where=launched.file, environment=launched.environment, notes=notes
    )
    own = _own_file(launched, flags, module, where)
    return launch if own is None else _over(of_file(own), launch, own)


def _is_unknown(word: str) -> bool:
    """`$(cat more_arguments)`: what it adds is not known, and a note says so."""
    gap = gap_of(word)
    return gap is not None and bool(gap.unknown) and word.startswith("$")


def _own_file(launched: Launched, flags: Mapping[str, str], module: str, where: str) -> Path | None:
    """The user's own configuration file: `--config-path` leads out of verl, or `--config-name` names none of verl's.

    Raises BadInput if it is not there. Hydra looks for a name in `--config-dir` only after verl's own.
    """
    path = flags.get("path")
    beside = path is None or _VERLS_FOLDER.fullmatch(Path(path).as_posix()) is not None
    name = flags.get("name", "" if beside else verl.config_of(module)).removesuffix(".yaml")
    if not name or (beside and name in verl.configs()):
        return None
    folder = path or flags.get("dir") or "."
    tried = [Path(folder) / f"{name}.yaml", Path(launched.file).parent / folder / f"{name}.yaml"]
    found = next((file for file in tried if file.is_file()), None)
    if found is None and name in verl.configs():
        raise BadInput(
            f"{where}: --config-path {path}: there is no file {tried[0]}; leave it out for verl's own {name}"
        )
    if found is None:
        raise BadInput(
            f"{where}: --config-name {name} is no configuration of verl{nearest(name, verl.configs())}, "
            f"and there is no file {tried[0]}"
        )
    return found


def _over(file: Launch, launch: Launch, path: Path) -> Launch:
    """A command line over the file that it names."""
    return replace(
        launch, config_name=file.config_name, whole=file.whole, marks=file.marks, left_out=file.left_out, file=path
    )


def _module(words: Sequence[tuple[str, str]], where: str) -> tuple[str, Sequence[tuple[str, str]]]:
    for index, (word, _) in enumerate(words):
        after = words[index + 1][0] if index + 1 < len(words) else ""
        if word == "-m" and "." in after:
            return after, words[index + 2 :]
        file = _MODULE_FILE.fullmatch(word)
        if file:
            return file.group(1).replace("/", "."), words[index + 1 :]
        if word.rpartition("/")[2] in ("main_ppo.py", "fully_async_main.py"):
            return _by_name(word), words[index + 1 :]
    raise BadInput(f"{where}: starts no module of verl; known are {', '.join(verl.modules())}")


def _by_name(word: str) -> str:
    stem = Path(word).stem
    parent = Path(word).parent.name
    same = [module for module in verl.modules() if module.endswith(f".{stem}")]
    return next((module for module in same if parent and f".{parent}." in module), same[0])


def of_file(path: Path) -> Launch:
    """The launch of a YAML or JSON file: a list of overrides, a part of a configuration, or a whole resolved one.

    A part may name only keys that exist, unless its `defaults:` list says what it builds on, as Hydra has it.
    """
    value, marks, line = document(text_of(path), str(path))
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        overrides = tuple((text, marks.get(str(index), str(path))) for index, text in enumerate(value))
        return Launch(overrides=overrides, where=str(path))
    if not isinstance(value, dict):
        raise BadInput(f"{path}:{line or 1}: expected `key: value` lines or a list of overrides")
    defaults = value.pop("defaults", ())
    base = _base(defaults)
    value.pop("hydra", None)
    leaves = flat(value)
    engine = _engine(leaves)
    config = base or _config_of(leaves)
    known = flat(verl.defaults(verl.HEAD, config, engine if engine in verl.engines() else None))
    whole = sum(key in leaves for key in known) > len(known) / 2
    if engine is not None:
        leaves["model_engine"] = engine
    strict = not (whole or base)
    own = path if defaults and path.suffix == ".yaml" else None
    return Launch(
        _module_of(config),
        config,
        (),
        leaves,
        _leaf_marks(leaves, marks),
        strict,
        where=str(path),
        file=own,
        left_out=_left_out(defaults, base, path),
    )


def _leaf_marks(leaves: Mapping[str, Any], marks: Marks) -> Marks:
    return {key: marks[key] for key in leaves if key in marks}


def _base(defaults: Any) -> str | None:
    """The configuration of verl that a `defaults:` list starts from."""
    entries = [entry for entry in defaults if isinstance(entry, str)] if isinstance(defaults, list) else []
    return next((entry for entry in entries if entry in verl.configs()), None)


def _left_out(defaults: Any, base: str | None, path: Path) -> tuple[str, ...]:
    """What of a `defaults:` list only Hydra over verl's own files could compose."""
    others = [entry for entry in defaults if entry not in (base, "_self_")] if isinstance(defaults, list) else []
    spelt = (f"{key}: {value}" for entry in others if isinstance(entry, dict) for key, value in entry.items())
    words = (*(entry for entry in others if isinstance(entry, str)), *spelt)
    return tuple(f"{path}: `{word}` of its defaults is not composed without an installed verl" for word in words)


def _config_of(leaves: Mapping[str, Any]) -> str:
    if any(key.startswith("async_training.") for key in leaves):
        return "fully_async_ppo_trainer"
    return "one_step_off_ppo_trainer" if "rollout.nnodes" in leaves else "ppo_trainer"


def _module_of(config: str) -> str:
    mode = verl.mode_of(config)
    return next(module for module in verl.modules() if verl.mode_of(verl.config_of(module)) == mode)


def _engine(leaves: Mapping[str, Any]) -> str | None:
    """The model engine of a configuration: as written, else by the actor's strategy."""
    written = leaves.get("model_engine")
    if written is not None:
        return str(written)
    strategy = leaves.get("actor_rollout_ref.actor.strategy")
    if strategy is None:
        return None
    return str(strategy) if strategy in verl.engines() else "dp"
