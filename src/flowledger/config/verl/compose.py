"""From overrides to verl's resolved configuration, with Hydra's rules and refusals, without Hydra, verl or torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flowledger.config.dotted import flat
from flowledger.config.near_key import near
from flowledger.config.settings import table
from flowledger.config.shell.word import Gap
from flowledger.config.shown import shown, shown_setting
from flowledger.config.verl import tree as trees
from flowledger.config.verl.interpolation import InterpolationError, Resolver, is_interpolation
from flowledger.config.verl.launch import Launch
from flowledger.config.verl.overrides import Kind, Override, parse, refuse
from flowledger.config.yaml_text import COMMAND_LINE
from flowledger.flow.errors import BadInput
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
    gaps: Mapping[str, Gap] = field(default_factory=dict)  # keys whose value the script leaves open
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
    overrides = [*file, *parse_all(launch.overrides)]
    engine, rest, hydra = _groups(overrides, verl.engine_of(config))
    try:
        tree = verl.defaults(version, config, engine)
    except BadInput as error:
        place = next((override.place for override in overrides if override.key == "model_engine"), "")
        raise refuse(place, str(error)) from None
    apply_all(tree, rest, Base(version, config, engine), environment)
    return Composed(
        version=version,
        module=launch.module,
        config=config,
        engine=engine,
        tree=resolved(tree, environment, rest),
        places={override.key: override.place or COMMAND_LINE for override in rest if override.kind != "delete"},
        gaps=gaps_of(rest),
        hydra=tuple(override.text for override in hydra),
    )


def parse_all(texts: Iterable[tuple[str, str]]) -> list[Override]:
    """All overrides of a command line. Raises BadInput with a line for each that is none."""
    found: list[Override] = []
    faults: list[str] = []
    for text, place in texts:
        try:
            found.append(parse(text, place))
        except BadInput as fault:
            faults.append(str(fault))
    if faults:
        raise BadInput("\n".join(dict.fromkeys(faults)))
    return found


def apply_all(tree: trees.Tree, overrides: Iterable[Override], base: "Base", environment: Mapping[str, str]) -> None:
    """Change the tree as all overrides ask. Raises BadInput with a line for each that Hydra refuses; it stops at the first."""
    faults: list[str] = []
    for override in overrides:
        try:
            apply(tree, override, base, environment)
        except BadInput as fault:
            faults.append(str(fault))
    if faults:
        raise BadInput("\n".join(dict.fromkeys(faults)))


def gaps_of(overrides: Iterable[Override]) -> dict[str, Gap]:
    """What the last override of each key leaves open."""
    last = {override.key: override.gap for override in overrides}
    return {key: gap for key, gap in last.items() if gap is not None}


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
        return f"Could not append to config. An item is already at '{override.key}'; give {shown_setting(override.text.lstrip('+'))}"
    return (
        f"Could not override '{override.key}': the word selects a configuration file, and only model_engine="
        f"{'|'.join(verl.engines())} is known here"
    )


def apply(tree: trees.Tree, override: Override, base: Base, environment: Mapping[str, str]) -> None:
    """Change the tree as one override asks. Raises BadInput where Hydra refuses it."""
    key = override.key
    if override.package is not None or "/" in key:
        reason = f"{shown_setting(override.text)} looks like a config group override, but config group '{key}' does not exist"
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
        raise refuse(override.place, f"Error merging override {shown_setting(override.text)}: {error}") from None


def _delete(tree: trees.Tree, override: Override, environment: Mapping[str, str]) -> None:
    found = trees.selected(tree, override.key, environment)
    if found is None:
        known = near(override.key, flat(tree))
        raise refuse(override.place, f"Could not delete from config. '{override.key}' does not exist{known}")
    if override.value is not None and override.value != found:
        reason = f"Could not delete from config. The value of '{override.key}' is {shown(override.key, found)} and not {shown(override.key, override.value)}"
        raise refuse(override.place, reason)
    trees.delete(tree, override.key)


def _add(tree: trees.Tree, override: Override, environment: Mapping[str, str]) -> None:
    found = trees.selected(tree, override.key, environment)
    if found is not None and not isinstance(override.value, (dict, list)):
        raise refuse(
            override.place,
            f"Could not append to config. An item is already at '{override.key}' (it is {shown(override.key, found)}); "
            f"use {override.key}=… without the plus, or ++{override.key}=… to force it",
        )
    trees.update(tree, override.key, override.value, adds=True)


def _unknown(tree: trees.Tree, override: Override, base: Base) -> str:
    """Hydra's words, where the key would exist or what is nearest, and how to add it all the same."""
    moved = table("verl_keys")["moved"].get(override.key)
    hint = (moved and f": {moved}") or _elsewhere(override.key, base) or near(override.key, flat(tree))
    return (
        f"Could not override '{override.key}'. verl {base.version} has no such key{hint}; "
        f"to add it nonetheless use +{override.key}=…"  # without its value, which may be a secret
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
