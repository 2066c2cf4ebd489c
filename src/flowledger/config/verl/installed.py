"""Composition by an installed verl: its own configuration files through Hydra, neither verl nor torch imported.

Hydra takes a second or two, so its modules are loaded only where a verl with its files is there. What Hydra refuses is said
in the words of `verl.compose`, with the place of the override.
"""

import importlib.metadata
import importlib.util
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from flowledger.config.dotted import place
from flowledger.config.shown import shown
from flowledger.config.verl.compose import Base, Composed, apply_all, gaps_of, of_leaf, parse_all, resolved, selecting
from flowledger.config.verl.launch import Launch
from flowledger.config.verl.overrides import Override, refuse
from flowledger.config.yaml_text import COMMAND_LINE
from flowledger.flow.errors import BadInput, nearest
from flowledger.tables import verl

TREES = "trainer/config"
EXPERIMENTAL = "experimental/*/config"  # of trainers that build on `trainer/config` by a search path
SEARCH = "hydra.searchpath"
_FILE = "flowledger_file"  # the name of a user's own file in Hydra's store


@dataclass(frozen=True, slots=True)
class Installed:
    """A verl on this machine whose configuration files can be composed. `folder`: the package `verl`."""

    version: str
    folder: Path

    @property
    def trees(self) -> Path:
        return self.folder / TREES

    def names(self) -> dict[str, Path]:
        """Configuration name -> the folder that holds it."""
        folders = (*sorted(self.folder.glob(EXPERIMENTAL)), self.trees)
        return {file.stem: folder for folder in folders for file in sorted(folder.glob("*.yaml"))}

    def folder_of(self, config: str) -> Path:
        """The folder of a configuration. Raises BadInput."""
        names = self.names()
        if config not in names:
            raise BadInput(f"verl {self.version}: no configuration {config!r} in {self.trees}{nearest(config, names)}")
        return names[config]


def installed() -> Installed | None:
    """The verl of this Python with its configuration files and hydra-core; None where one of them is missing."""
    try:
        version = importlib.metadata.version("verl")
        found = importlib.util.find_spec("verl")
        hydra = importlib.util.find_spec("hydra")
    except (importlib.metadata.PackageNotFoundError, ImportError, ValueError):
        return None
    for folder in (found.submodule_search_locations or ()) if found and hydra else ():
        if (Path(folder) / TREES / "ppo_trainer.yaml").is_file():
            return Installed(version, Path(folder).resolve())
    return None


def compose(launch: Launch, there: Installed, environment: Mapping[str, str] | None = None) -> Composed:
    """The configuration of a launch, composed by Hydra. Raises BadInput (`file:line: reason`) where it is refused."""
    environment = environment or {}
    file = tuple(of_leaf(launch, key, value) for key, value in launch.whole.items())
    line = tuple(parse_all(launch.overrides))
    own = [override for override in line if _of_hydra(override)]
    work = _Work(
        there=there,
        launch=launch,
        asked=_asked(own),
        environment=environment,
        file=file,
        line=tuple(override for override in line if not _of_hydra(override)),
    )
    tree = work.composed()
    changes = [override for override in (*file, *work.line) if not selecting(override)]
    return Composed(
        version=there.version,
        module=launch.module,
        config=launch.config,
        engine=work.engine(tree),
        tree=tree,
        places={override.key: override.place or COMMAND_LINE for override in changes if override.kind != "delete"},
        gaps=gaps_of(changes),
        hydra=tuple(override.text for override in own),
    )


def _of_hydra(override: Override) -> bool:
    return override.key.split(".")[0].split("/")[0] == "hydra"


def _asked(own: Sequence[Override]) -> tuple[str, ...]:
    """The search path that the user gives."""
    values = [override.value for override in own if override.key == SEARCH]
    return tuple(str(item) for value in values[-1:] if isinstance(value, list) for item in value)


def _quoted(words: Sequence[str]) -> str:
    """A list in Hydra's grammar, whatever letters a folder's name has."""
    spelt = (word.replace("'", "\\'") for word in words)
    return "[" + ",".join(f"'{word}'" for word in spelt) + "]"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """One composition: the user's file laid over verl's configuration, then the overrides of the command line."""

    there: Installed
    launch: Launch
    asked: tuple[str, ...]
    environment: Mapping[str, str]
    file: tuple[Override, ...]
    line: tuple[Override, ...]

    def composed(self) -> dict[str, Any]:
        """The resolved tree. Raises BadInput."""
        try:
            if self.launch.strict:  # Hydra takes every key of a file; a part may name only those that are there
                self._applied(self.file)
            if self.launch.file is not None:
                return self._run(self.launch.file.resolve(), self.line, resolve=True)
            return self._run(self._stored(), (*self._groups_of_file(), *self.line), resolve=True)
        except _failures() as error:
            raise self._refusal(error) from None

    def engine(self, tree: Mapping[str, Any]) -> str:
        return str(tree.get("model_engine", verl.engine_of(self.launch.config)))

    def _groups_of_file(self) -> list[Override]:
        """The engine that the file names, unless the command line does."""
        said = {override.key for override in self.line}
        return [override for override in self.file if selecting(override) and override.key not in said]

    def _own(self) -> Path:
        return self.there.folder_of(self.launch.config) / self.launch.config

    def _stored(self) -> Path:
        """The configuration to load: verl's, or a part or dump over it, which Hydra's store then holds."""
        if not self.launch.whole:
            return self._own()
        node: dict[str, Any] = {"defaults": [self.launch.config, "_self_"]}
        for key, value in self.launch.whole.items():
            if key != "model_engine":
                place(node, key, value)
        import_module("hydra.core.config_store").ConfigStore.instance().store(name=_FILE, node=node)
        return self._own().with_name(_FILE)

    def _run(self, config: Path, overrides: Sequence[Override], *, resolve: bool) -> dict[str, Any]:
        """`config`: folder and name. What lies elsewhere is found by a search path, which counts above the file's own."""
        hydra, omegaconf = import_module("hydra"), import_module("omegaconf")
        beside = [folder for folder in dict.fromkeys((self._own().parent, self.there.trees)) if folder != config.parent]
        search = [*(f"file://{folder}" for folder in beside), *self.asked]
        texts = [*(override.text for override in overrides), *([f"{SEARCH}={_quoted(search)}"] if search else [])]
        with _only(self.environment), hydra.initialize_config_dir(str(config.parent), version_base=None):
            composed = hydra.compose(config.name.removesuffix(".yaml"), texts)
            tree: dict[str, Any] = omegaconf.OmegaConf.to_container(composed, resolve=resolve)
        return tree

    def _applied(self, overrides: Sequence[Override]) -> dict[str, Any]:
        """verl's configuration by Hydra, changed by our own rules: they refuse with a place and the nearest key."""
        groups = [*self._groups_of_file(), *(override for override in self.line if selecting(override))]
        try:
            tree = self._run(self._own(), groups, resolve=False)
        except _failures() as error:
            raise _in_hydras_words(groups, error) from None
        base = Base(self.there.version, self.launch.config, self.engine(tree))
        apply_all(tree, [override for override in overrides if not selecting(override)], base, self.environment)
        return tree

    def _refusal(self, error: Exception) -> BadInput:
        """What our own rules say of what Hydra refused; where they take it, Hydra's first line with its override."""
        every = (*self.file, *self.line)
        try:
            resolved(self._applied(every), self.environment, every)
        except BadInput as refusal:
            return refusal
        return _in_hydras_words(every, error)


def _failures() -> tuple[type[Exception], ...]:
    """What Hydra and OmegaConf raise for a configuration that they refuse, or for a file that they cannot read."""
    hydra, omegaconf = import_module("hydra.errors"), import_module("omegaconf.errors")
    return (hydra.HydraException, omegaconf.OmegaConfBaseException, yaml.YAMLError)


def _in_hydras_words(overrides: Sequence[Override], error: Exception) -> BadInput:
    """Hydra's first line, with the override that it speaks of and the options that a group has."""
    text = str(error)
    told = next((o for o in overrides if f"'{o.key}" in text or o.text in text), None)
    told = told or next((o for o in overrides if re.search(rf"\b{re.escape(o.key)}\b", text)), None)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    first = re.sub(r"^In '[^']+': ", "", first).rstrip(".")
    choices = text.partition("Available options in ")[2].partition("Config search path")[0].splitlines()[1:]
    options = ", ".join(choice.strip() for choice in choices if choice.strip())
    if told is None or not options:
        return refuse(told.place if told else "", first)
    key, _, value = told.text.partition("=")
    return refuse(told.place, f"{key} = {shown(key, value)}: {first}; use {options}")


@contextmanager
def _only(environment: Mapping[str, str]) -> Iterator[None]:
    """The script's own variables as the process's, so that `oc.env` answers as it does without an installed verl; quiet,
    since Hydra warns of each folder of a search path that only the run's machine has."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environment)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
