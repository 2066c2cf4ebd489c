"""From overrides to verl's resolved configuration, with Hydra's rules and refusals, without Hydra, verl or torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowledger.config.dotted import flat
from flowledger.config.verl import tree as trees
from flowledger.config.verl.interpolation import InterpolationError, Resolver, is_interpolation
from flowledger.config.verl.launch import Launch
from flowledger.config.verl.overrides import Kind, Override, parse, refuse
from flowledger.config.yaml_text import COMMAND_LINE
from flowledger.flow.errors import BadInput, nearest
from flowledger.tables import verl


@dataclass(frozen=True, slots=True)
class Base:
    """The defaults that overrides are laid over."""

    version: str
    config: str
    engine: str

    def leaves(self) -> dict[str, Any]:
        return flat(verl.defaults(self.version, self.config, self.engine))


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A composed configuration, resolved. `tree` is nested; an empty section is there as an empty dictionary."""

    version: str
    module: str
    config: str
    engine: str
    tree: dict[str, Any]
    places: Mapping[str, str]  # key that the user set -> `file:line`
    hydra: tuple[str, ...] = ()  # overrides of Hydra's own settings, which change no value

    @property
    def leaves(self) -> dict[str, Any]:
        """Flat, dotted leaves."""
        return flat(self.tree)


def compose(launch: Launch, version: str, environment: Mapping[str, str] | None = None) -> Composed:
    """The configuration of a launch. Raises BadInput (`file:line: reason`) where Hydra would refuse it."""
    environment = environment or {}
    config = launch.config
    file = [of_leaf(launch, key, value) for key, value in launch.whole.items()]
    overrides = [*file, *(parse(text, place) for text, place in launch.overrides)]
    engine, rest, hydra = _groups(overrides, verl.engine_of(config))
    try:
        tree = verl.defaults(version, config, engine)
    except BadInput as error:
        place = next((override.place for override in overrides if override.key == "model_engine"), "")
        raise refuse(place, str(error)) from None
    for override in rest:
        apply(tree, override, Base(version, config, engine), environment)
    return Composed(
        version=version,
        module=launch.module,
        config=config,
        engine=engine,
        tree=resolved(tree, environment, rest),
        places={override.key: override.place or COMMAND_LINE for override in rest if override.kind != "delete"},
        hydra=tuple(override.text for override in hydra),
    )


def of_leaf(launch: Launch, key: str, value: Any) -> Override:
    """A leaf of a file as an override: of known keys only where the file is a part of a configuration."""
    kind: Kind = "change" if launch.strict or key == "model_engine" else "force"
    return Override(kind, key, value, f"{key}={_short(value)}", launch.marks.get(key, launch.where))


def _groups(overrides: Iterable[Override], engine: str) -> tuple[str, list[Override], list[Override]]:
    """The engine that is selected, what changes keys, and what speaks to Hydra alone."""
    rest: list[Override] = []
    hydra: list[Override] = []
    for override in overrides:
        if override.key.split(".")[0].split("/")[0] == "hydra":
            hydra.append(override)
        elif not selecting(override):
            rest.append(override)
        elif override.key == "model_engine" and override.package is None and override.kind == "change":
            engine = str(override.value)
        else:
            raise refuse(override.place, _no_group(override))
    return engine, rest, hydra


def selecting(override: Override) -> bool:
    """Whether an override picks a file of a configuration group instead of changing a key."""
    return override.key in verl.groups() and not isinstance(override.value, dict)


def _no_group(override: Override) -> str:
    if override.kind == "add":
        return f"Could not append to config. An item is already at '{override.key}'; give {override.text.lstrip('+')}"
    return (
        f"Could not override '{override.key}': the word selects a configuration file, and only model_engine="
        f"{'|'.join(verl.engines())} is known here"
    )


def apply(tree: trees.Tree, override: Override, base: Base, environment: Mapping[str, str]) -> None:
    """Change the tree as one override asks. Raises BadInput where Hydra refuses it."""
    key = override.key
    if override.package is not None or "/" in key:
        reason = f"{override.text} looks like a config group override, but config group '{key}' does not exist"
        raise refuse(override.place, reason)
    try:
        match override.kind:
            case "delete":
                _delete(tree, override, environment)
            case "add":
                _add(tree, override, environment)
            case "force":
                trees.update(tree, key, override.value, adds=True)
            case "change":
                trees.update(tree, key, override.value, adds=False)
    except trees.UnknownKeyError:
        raise refuse(override.place, _unknown(tree, override, base)) from None
    except trees.OtherKindError as error:
        raise refuse(override.place, f"Error merging override {override.text}: {error}") from None


def _delete(tree: trees.Tree, override: Override, environment: Mapping[str, str]) -> None:
    found = trees.selected(tree, override.key, environment)
    if found is None:
        known = nearest(override.key, flat(tree))
        raise refuse(override.place, f"Could not delete from config. '{override.key}' does not exist{known}")
    if override.value is not None and override.value != found:
        reason = f"Could not delete from config. The value of '{override.key}' is {found} and not {override.value}"
        raise refuse(override.place, reason)
    trees.delete(tree, override.key)


def _add(tree: trees.Tree, override: Override, environment: Mapping[str, str]) -> None:
    found = trees.selected(tree, override.key, environment)
    if found is not None and not isinstance(override.value, (dict, list)):
        text = override.text
        raise refuse(
            override.place,
            f"Could not append to config. An item is already at '{override.key}' (it is {_short(found)}); "
            f"use {text[1:]}, or +{text} to force it",
        )
    trees.update(tree, override.key, override.value, adds=True)


def _unknown(tree: trees.Tree, override: Override, base: Base) -> str:
    """Hydra's words, where the key would exist or what is nearest, and how to add it all the same."""
    hint = _elsewhere(override.key, base) or _nearest_key(override.key, list(flat(tree)))
    return (
        f"Could not override '{override.key}'. verl {base.version} has no such key{hint}; "
        f"to add it nonetheless use +{override.text}"
    )


def _elsewhere(key: str, base: Base) -> str:
    """Whether another engine or another version has the key; nothing is known of a version without defaults here."""
    if base.version not in verl.versions():
        return ""
    for engine in verl.engines():
        if engine != base.engine and key in replace(base, engine=engine).leaves():
            return f" with model_engine={base.engine}; give model_engine={engine}"
    for version in verl.versions():
        if version != base.version and key in replace(base, version=version).leaves():
            return f"; verl {version} has it"
    return ""


def _nearest_key(key: str, known: Sequence[str]) -> str:
    """The key that lacks only its beginning; the same last word elsewhere; a word like it in this section, then anywhere."""
    section, _, last = key.rpartition(".")
    whole = [name for name in known if name.endswith(f".{key}")]
    same = [name for name in known if name.rpartition(".")[2] == last]
    beside = [name for name in known if name.rpartition(".")[0] == section]
    if whole or same:
        return nearest(key, whole or same)
    for names in (beside, known):
        close = nearest(last, [name.rpartition(".")[2] for name in names])
        if close:
            word = close.removeprefix("; did you mean ").removesuffix("?")
            return nearest(key, [name for name in names if name.rpartition(".")[2] == word])
    return ""


def resolved(tree: trees.Tree, environment: Mapping[str, str], overrides: Sequence[Override]) -> trees.Tree:
    """The tree without interpolations. Raises BadInput for one that leads nowhere."""
    try:
        return Resolver(tree, environment).whole()
    except InterpolationError as error:
        by_user = next((o for o in overrides if str(error).startswith(o.key) or is_interpolation(o.value)), None)
        raise refuse(by_user.place if by_user else "", str(error)) from None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
