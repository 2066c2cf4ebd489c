"""What to turn: the rows of `tables/advice.toml`, with the key that a framework has for each and the value it has now."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from flowledger.ledger.manifest import value_at


@cache
def _rows() -> Mapping[str, Mapping[str, Any]]:
    text = files("flowledger.tables").joinpath("advice.toml").read_text(encoding="utf-8")
    return {row["id"]: row for row in tomllib.loads(text)["change"]}


def fix(change: str, framework: str, config: Mapping[str, Any], *, to: Any = None) -> dict[str, str] | None:
    """`{"key", "from", "to"}` of a change, in the key's own values; `to`: one that was worked out, in those of RunConfig. None
    where the framework has no such key, or it is set so already.
    """
    row = _rows()[change]
    key = row["keys"].get(framework)
    if key is None:
        return None
    now = value_at(config, row["path"])
    new = to if to is not None else _new(row, now)
    if new is not None and new == now:
        return None
    name, sign, written = key.partition("=")
    name, _, after = (name, "", "") if sign else key.partition(": ")
    own = _own(config, name)
    if to is None and (text := written or after):
        return {"key": name, "from": _plain(now if own is None and name == row["path"] else own), "to": text}
    return {"key": name, "from": _plain(now if own is None else own), "to": _plain(_scaled(new, now, own))}


def _own(config: Mapping[str, Any], key: str) -> Any:
    """What the framework's own key has; None where nothing says."""
    raw = config.get("raw")
    return raw.get(key, value_at(raw, key)) if isinstance(raw, Mapping) else None


def _scaled(new: Any, now: Any, own: Any) -> Any:
    """A value of RunConfig as the key counts it: a budget of one GPU is that of all ranks that share a sequence in RunConfig."""
    if any(isinstance(one, bool) or not isinstance(one, (int, float)) for one in (new, now, own)) or not now:
        return new
    return max(1, new * own // now) if all(isinstance(one, int) for one in (new, now, own)) else new * own / now


def costs(change: str, language: str) -> str:
    """What a change is paid with."""
    row = _rows()[change]
    return str(row["costs" if language == "en" else "costs_zh"])


def _new(row: Mapping[str, Any], now: Any) -> Any:
    if "times" not in row:
        return row["to"]
    if isinstance(now, bool) or not isinstance(now, (int, float)):
        return None
    smaller = now * row["times"]
    return max(1, int(smaller)) if isinstance(now, int) else round(smaller, 3)


def _plain(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
