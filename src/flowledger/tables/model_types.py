"""How the `config.json` of each model type says the sizes of its model: the rows of `model_types.toml`."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """One way to write sizes, shared by the model types of `names`."""

    names: tuple[str, ...] = ()
    keys: Mapping[str, list[str]]  # field -> keys that say it, tried in order
    moe_keys: Mapping[str, list[str]]
    fixed: Mapping[str, Any]  # fields that the type decides
    moe_fixed: Mapping[str, Any]
    defaults: Mapping[str, Any]  # key -> what it means that it is missing
    switch: Mapping[str, Mapping[str, Any]]  # key -> fields that it sets when it is true
    pattern: str = ""  # kinds of layers where no list names them
    linear: str = ""  # the mixer of linear layers
    gated: bool = True
    position_offset: int = 0  # rows of a position table beyond the positions


@cache
def model_types() -> Mapping[str, ModelType]:
    """Every known model type by name."""
    table = _table()
    found: dict[str, ModelType] = {}
    for raw in table["type"]:
        row = _row(table, raw)
        for name in row.names:
            if found.setdefault(name, row) is not row:
                raise AssertionError(f"model_types.toml: {name} stands twice")
    return found


@cache
def generic() -> ModelType:
    """The reading of a type that the table does not know: as a Llama."""
    return _row(_table(), {})


def refused() -> tuple[str, ...]:
    """Model types that have the usual keys and are no decoder-only language model."""
    return tuple(_table()["refused"])


def nested() -> tuple[str, ...]:
    """Keys under which a model of several modalities keeps its language model."""
    return tuple(_table()["nested"])


def _row(table: Mapping[str, Any], raw: Mapping[str, Any]) -> ModelType:
    fields: dict[str, Any] = {"fixed": {}, "moe_fixed": {}, "defaults": {}, "switch": {}, **raw}
    fields["keys"] = {**table["usual"], **raw.get("keys", {})}
    fields["moe_keys"] = table["usual_moe"]
    return ModelType(**{**fields, "names": tuple(fields.get("names", ()))})


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("flowledger.tables").joinpath("model_types.toml").read_text(encoding="utf-8"))
