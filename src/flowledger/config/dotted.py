"""Nested dictionaries by dotted keys, and the override words of Hydra: `a.b=1`, `+a.b=1`, `++a.b=1`, `~a.b`."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from flowledger.config.near_key import near
from flowledger.config.shell.word import Word, gap_of, marked
from flowledger.config.shown import shown, shown_setting
from flowledger.config.yaml_text import COMMAND_LINE, document
from flowledger.flow.errors import BadInput

Tree = dict[str, Any]
ABSENT = object()


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value for every leaf. A list is a leaf, and so is an empty section."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def at(tree: Any, key: str) -> Any:
    """The value or section at a dotted key; ABSENT where there is none."""
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return ABSENT
        tree = tree[part]
    return tree


def place(tree: Tree, key: str, value: Any) -> None:
    """Set a dotted key, making the sections above it; what stands there and is no section gives way."""
    *above, last = key.split(".")
    for part in above:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[last] = value


def merged(below: Tree, above: Tree) -> Tree:
    """Both trees in one; where both have a leaf, the one above counts. Neither is changed."""
    found = dict(below)
    for name, value in above.items():
        old = found.get(name)
        below_it = old if isinstance(old, dict) else {}
        found[name] = merged(below_it, value) if isinstance(value, dict) else value
    return found


def override(tree: Tree, marks: dict[str, str], text: str) -> None:
    """Apply one Hydra override to a composed tree. Raises BadInput where Hydra refuses it."""
    match = re.fullmatch(r"(\+\+|\+|~)?([^=+~\s][^=\s]*)(?:=(.*))?", text.strip(), re.DOTALL)
    if not match or (match[3] is None and match[1] != "~"):
        raise BadInput(
            f"{COMMAND_LINE}: {shown_setting(text)!r} is no override; write key=value, +key=value, ++key=value or ~key"
        )
    sign, key = match[1] or "", match[2].replace("/", ".")
    old = at(tree, key)
    if sign in ("", "~") and old is ABSENT:
        hint = near(key, flat(tree))
        way = "" if sign else f"; to add it, write +{key}=…"
        raise BadInput(f"{COMMAND_LINE}: {key} is no key of the composed configuration{hint}{way}")
    for known in [known for known in marks if known == key or known.startswith(f"{key}.")]:
        del marks[known]
    if sign == "~":
        _remove(tree, key)
        return
    gap, where = gap_of(text), text.place if isinstance(text, Word) else COMMAND_LINE
    value = (match[3] or "").replace("${", "$ {") if gap and gap.unknown else _value(match[3] or "", text)
    if sign == "+" and old is not ABSENT and old is not None and not isinstance(value, dict | list):
        raise BadInput(
            f"{COMMAND_LINE}: +{key}: the key is there already ({shown(key, old)}); write {key}=… or ++{key}=…"
        )
    place(tree, key, merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value)
    marks |= dict.fromkeys((key, *_inside(key, value)), marked(where, gap))


def _inside(key: str, value: Any) -> Iterator[str]:
    return (f"{key}.{name}" for name in flat(value)) if isinstance(value, dict) else iter(())


def _value(text: str, override: str) -> Any:
    spaced = re.sub(r"([\w\]}'\"]):(?=[^\s/:])", r"\1: ", text) if text.lstrip().startswith("{") else text
    try:
        return document(spaced, COMMAND_LINE)[0] if text.strip() else ""
    except BadInput as error:
        raise BadInput(f"{error} in {shown_setting(override)!r}") from None


def _remove(tree: Tree, key: str) -> None:
    above, _, last = key.rpartition(".")
    section = at(tree, above) if above else tree
    del section[last]
