"""Turns what pydantic has to say about a configuration into one line a fault: place, key, value, rule, way out."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from annotated_types import Ge
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flowledger.config.schema import RunConfig
from flowledger.config.section import Section
from flowledger.config.shown import shown
from flowledger.flow.errors import nearest
from flowledger.tables.algorithms import meant

Location = Sequence[int | str]


def complaints(error: ValidationError, marks: Mapping[str, str], file: str | None) -> list[str]:
    """A line for each fault, in the order of the schema. `marks` says where each dotted key stands."""
    return [_line(fault, marks, file) for fault in error.errors(include_url=False)]


def _line(fault: ErrorDetails, marks: Mapping[str, str], file: str | None) -> str:
    location = fault["loc"]
    key = ".".join(map(str, location))
    match fault["type"]:
        case "extra_forbidden":
            text = f"unknown key {key}{_known(location)}"
        case "missing":
            text = f"{key} is missing{_meaning(location)}"
        case "value_error":
            text = fault["msg"].removeprefix("Value error, ")
            text = f"{key}: {text}" if key and key not in text else text
        case "model_type" | "model_attributes_type" | "dict_type":
            text = f"{key} = {_value(key, fault['input'])} should be a section of keys, or left out{_meaning(location)}"
        case "invalid_key":
            text = f"key {key} should be a word"
        case _:
            text = f"{key} = {_value(key, fault['input'])} {_rule(fault)}"
    place = _place(key, text, marks, file)
    return f"{place}: {text}" if place else text


def _place(key: str, text: str, marks: Mapping[str, str], file: str | None) -> str | None:
    """The mark of the key, else of a key that the text names, of one inside it, of what is around it, or the file."""
    named = [word for word in re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)+|[a-z_]+", text) if word in marks and "." in word]
    parts = key.split(".")
    around = [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]
    inside = [name for name in marks if name.startswith(f"{key}.")]
    return next((marks[name] for name in (key, *named, *inside, *around) if name in marks), file)


# What pydantic says in Python's words -> the user's
WORDS = {
    "int_type": "a whole number", "int_parsing": "a whole number", "int_from_float": "a whole number",
    "float_type": "a number", "float_parsing": "a number",
    "bool_type": "true or false", "bool_parsing": "true or false",
    "string_type": "text",
    "tuple_type": "a list", "list_type": "a list",
}  # fmt: skip


def _rule(fault: ErrorDetails) -> str:
    if fault["type"] in WORDS:
        return f"should be {WORDS[fault['type']]}{_instead(fault)}"
    rule = fault["msg"].replace("Input should be", "should be").replace("String should", "should")
    context = fault.get("ctx", {})
    if fault["type"] == "literal_error":
        allowed = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        use = meant(".".join(map(str, fault["loc"])), str(fault["input"]))
        return rule + (f"; use {use}" if use in allowed else nearest(str(fault["input"]), allowed))
    bound = context.get("ge", context.get("le"))
    return rule if bound is None else f"{rule}; use {bound}"


def _instead(fault: ErrorDetails) -> str:
    """`; use 2`: the nearest whole number, one value as a list, else the default."""
    above, name, given = fault["loc"][:-1], fault["loc"][-1], fault["input"]
    section = _section(above)
    fields = section.model_fields if section else {}
    field = next((one for key, one in fields.items() if (one.alias or key) == name), None)
    default = None if field is None or field.is_required() else field.get_default(call_default_factory=True)
    if fault["type"] == "int_from_float" and abs(given) < 2**53:
        least = [one.ge for one in getattr(field, "metadata", ()) if isinstance(one, Ge) and isinstance(one.ge, int)]
        return f"; use {max(round(given), *least) if least else round(given)}"
    if fault["type"] in ("tuple_type", "list_type"):
        whole = field is not None and field.annotation == tuple[int, ...]
        of = " of whole numbers" if whole else ""
        return f"{of}; use [{given}]" if isinstance(given, int) and not isinstance(given, bool) else f"{of}; use []"
    return f"; use {_spell(default)}" if isinstance(default, int | float) else ""


def _known(location: Location) -> str:
    """`; did you mean actor.epochs?`: the nearest key of the same section, else the same name in another section."""
    *above, word = map(str, location)
    prefix = "".join(f"{part}." for part in above)
    section = _section(location[:-1])
    here = _keys(section) if section else []
    guess = nearest(word, here)
    if guess:
        return guess.replace("did you mean ", f"did you mean {prefix}")
    elsewhere = [key for key in _all_keys(RunConfig) if key.rpartition(".")[2] == word]
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere)}?"
    return f"; {prefix.rstrip('.') or 'a run'} has {', '.join(here)}" if here else ""


def _meaning(location: Location) -> str:
    section = _section(location)
    return f" ({(section.__doc__ or '').splitlines()[0].rstrip('.')})" if section else ""


def _section(location: Location) -> type[BaseModel] | None:
    """The section that a location leads to; None where it leads to a plain value."""
    at: type[BaseModel] | None = RunConfig
    for part in location:
        if isinstance(part, int):  # an item of a list: its section was already found in the list's type
            continue
        at = next((found for name, found in _subsections(at) if name == part), None) if at else None
    return at


def _subsections(section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in section.model_fields.items():
        for found in _sections_in(field.annotation):
            yield field.alias or name, found


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_in(argument)


def _keys(section: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items()]


def _all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    inner = dict(_subsections(section))
    for name in _keys(section):
        yield prefix + name
        if name in inner:
            yield from _all_keys(inner[name], f"{prefix}{name}.")


def _value(key: str, value: object) -> str:
    """The value of a key, and not that of a secret."""
    spelt = _spell(value)
    return "…" if isinstance(value, str) and shown(key, value) == "…" else spelt


def _spell(value: object) -> str:
    """A value as one would write it in YAML, kept to one short line."""
    try:
        text = str(value).lower() if isinstance(value, bool) else "null" if value is None else repr(value)
    except ValueError:  # Python refuses to write out integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."
