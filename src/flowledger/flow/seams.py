"""Seams: functions replaced from outside for a while, by dotted name. Serves the recorder and fault injection alike."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

Function = Callable[..., Any]
SCOPES = ("step", "stage", "epoch", "mini_batch", "micro_batch", "decode", "collective", "call")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Where to watch: a function, the stage it belongs to, and which arguments and results are which tensors.

    `stage` None means: the stage that is open when it is called. `args` maps a parameter to a tensor of the flow;
    `results` maps a field of the result ("" is the result itself) to a tensor; `metrics` maps a field to a metric's
    name ("*" as name: the field is a dict of metrics). `scope` says what one call counts as in the position of a step.

    Frameworks whose step is no function have calls at its edges: what such a call begins stays open until the call that
    ends it, or until something around it ends. A micro-batch that begins while its stage is not open opens that too.
    `only_if` are paths in the arguments that must lead to the same object, two by two, or to the text after an `=`;
    `within` and `not_within` are stages one of which must be open, or none. `opens_step`: in a process that is not told of
    steps, this stage begins one where it cannot belong to the one before. `argument_access` and `result_access` say what a
    call does with its tensors, where it does not read its arguments and write its result. `told`: a function that is told of
    each call when it has returned, instead of a span, where calls come too often for one. `streams`: the first part of the
    result is an iterator of names and weights, which are counted as they pass.
    """

    stage: str | None
    target: str
    phase: str | None = None
    scope: str = "stage"
    role: str | None = None
    args: Mapping[str, str] = field(default_factory=dict)
    results: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, str] = field(default_factory=dict)
    versions: str = ""
    optional: bool = False
    edge: Literal["", "begin", "end"] = ""
    only_if: Mapping[str, str] = field(default_factory=dict)
    within: tuple[str, ...] = ()
    not_within: tuple[str, ...] = ()
    opens_step: bool = False
    streams: bool = False
    argument_access: Literal["read", "write"] = "read"
    result_access: Literal["read", "write"] = "write"
    told: str = ""


class Missed(Exception):  # noqa: N818
    """A dotted name that is not there (another version of the framework, say)."""


@contextmanager
def replaced(changes: Sequence[tuple[str, Callable[[Function], Function]]]) -> Iterator[list[str]]:
    """Replace each target by what its maker returns for the original; put everything back at the end.

    Yields the targets that were not found. A target replaced twice is wrapped twice and unwound in reverse order.
    """
    missed: list[str] = []
    with ExitStack() as stack:
        for target, make in changes:
            try:
                stack.callback(replace(target, make))
            except Missed:
                missed.append(target)
        yield missed


def replace(target: str, make: Callable[[Function], Function]) -> Callable[[], None]:
    """Replace a target by what its maker returns for the original; returns what puts it back. Raises Missed."""
    owner, name, original = locate(target)
    setattr(owner, name, make(original))
    return partial(setattr, owner, name, original)


def locate(target: str) -> tuple[Any, str, Function]:
    """(owner, attribute, function) of `package.module:name` or `package.module:Class.name`. Raises Missed."""
    module_name, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise Missed(f"{target}: {error}") from error
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    found = vars(owner).get(name) if owner is not None else None
    if found is None and owner is not None and not isinstance(owner, type):
        found = getattr(owner, name, None)  # a module that makes its names when they are asked for
    if not callable(found) and not isinstance(found, classmethod):  # gone, or a property now
        raise Missed(target)
    return owner, name, found
