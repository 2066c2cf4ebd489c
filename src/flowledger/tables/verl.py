"""verl's composed defaults, per version, configuration name and model engine: keys, values, and interpolations as written.

One table of leaves with a condition on each layer (`verl_defaults.json`), so that a fact stands once: of some 900 leaves
720 hold everywhere.
"""

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from flowledger.flow.errors import BadInput, nearest

HEAD = "head"
DEFAULT_MODULE = "verl.trainer.main_ppo"


@cache
def _table() -> Mapping[str, Any]:
    text = files("flowledger.tables").joinpath("verl_defaults.json").read_text(encoding="utf-8")
    table: Mapping[str, Any] = json.loads(text)
    return table


@cache
def _entries() -> Mapping[str, Any]:
    return tomllib.loads(files("flowledger.tables").joinpath("verl.toml").read_text(encoding="utf-8"))


def versions() -> tuple[str, ...]:
    """The versions whose defaults are known, oldest first."""
    return tuple(_table()["versions"])


def engines() -> tuple[str, ...]:
    """What `model_engine` may be."""
    return tuple(_table()["engines"])


def modules() -> tuple[str, ...]:
    """Python modules that start a run."""
    return tuple(_entries()["modules"])


def configs() -> tuple[str, ...]:
    """Names of configurations that Hydra loads for a run."""
    return tuple(_entries()["configs"])


def groups() -> frozenset[str]:
    """Words that select a file where they stand alone left of `=`."""
    return frozenset(_entries()["groups"]["names"])


def config_of(module: str) -> str:
    """The configuration name that a module loads by itself. Raises BadInput for a module that is not known."""
    known = _entries()["modules"]
    if module not in known:
        raise BadInput(f"{module} is no module of verl that starts a run{nearest(module, known)}")
    return str(known[module])


def engine_of(config: str) -> str:
    """The model engine that a configuration picks by itself."""
    return str(_named(config)["engine"])


def mode_of(config: str) -> str:
    """`colocated`, `one_step_off` or `fully_async`."""
    return str(_named(config)["mode"])


def _named(config: str) -> Mapping[str, str]:
    known: Mapping[str, Mapping[str, str]] = _entries()["configs"]
    if config not in known:
        raise BadInput(f"verl's configuration {config!r} is not known{nearest(config, known)}")
    return known[config]


def defaults(version: str, config: str, engine: str | None = None) -> dict[str, Any]:
    """A fresh nested tree of the composed defaults; interpolations (`${…}`) as they are written.

    Raises BadInput for a version, configuration or engine that is not known.
    """
    if version not in versions():
        raise BadInput(
            f"verl {version}: its defaults are not known{nearest(version, versions())}; use {', '.join(versions())}"
        )
    engine = engine or engine_of(config)
    if engine not in engines():
        raise BadInput(f"model_engine = {engine}: Could not find 'model_engine/{engine}'; use {', '.join(engines())}")
    here = {"version": version, "mode": mode_of(config), "engine": engine}
    tree: dict[str, Any] = {}
    for layer in _table()["layers"]:
        if all(here[axis] in allowed for axis, allowed in layer["when"].items()):
            _lay(tree, layer["set"])
    return tree


def _lay(tree: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, dict) and value:
            _lay(tree.setdefault(key, {}), value)
        else:
            tree[key] = list(value) if isinstance(value, list) else dict(value) if isinstance(value, dict) else value
