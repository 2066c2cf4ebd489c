"""What a fault changes: functions of the loop by their seams, healthy until a step and sick from it on.

A fault is a function without arguments that returns `Changes`. It is called anew for every run, so what it remembers
is of one run. It knows nothing of steps: `from_step` lets the loop be well until the fault begins.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flowledger.flow.errors import BadInput, nearest
from flowledger.flow.seams import Function

Maker = Callable[[Function], Function]  # the original -> what stands in its place
Changes = Mapping[str, Maker]  # `module:function` of the loop -> its maker
RL_STEP = "flowledger.run.loop:rl_step"


def results(**fields: Callable[[Any], Any]) -> Maker:
    """Fields of what a function returns, each changed by a function of its value; None stays None."""

    def make(original: Function) -> Function:
        def sick(*args: Any, **words: Any) -> Any:
            made = original(*args, **words)
            return replace(made, **_changed({name: getattr(made, name) for name in fields}, fields))

        return sick

    return make


def words(**changes: Callable[[Any], Any]) -> Maker:
    """Keyword arguments of a function, each changed by a function of its value; those not given, or None, stay so."""

    def make(original: Function) -> Function:
        def sick(*args: Any, **given: Any) -> Any:
            return original(*args, **(given | _changed(given, changes)))

        return sick

    return make


def _changed(values: Mapping[str, Any], changes: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    return {name: change(values[name]) for name, change in changes.items() if values.get(name) is not None}


def from_step(changes: Changes, starts: int) -> list[tuple[str, Maker]]:
    """The changes in the form of `flow.seams.replaced`: the loop is well before step `starts`, and sick from it on."""
    now = {"step": 0}

    def gated(maker: Maker) -> Maker:
        def make(original: Function) -> Function:
            sick = maker(original)

            def function(*args: Any, **given: Any) -> Any:
                return (sick if now["step"] >= starts else original)(*args, **given)

            return function

        return make

    def counted(original: Function) -> Function:
        def rl_step(**given: Any) -> Any:
            now["step"] = given["step"]
            return original(**given)

        return rl_step

    return [*((target, gated(maker)) for target, maker in changes.items()), (RL_STEP, counted)]


def named(name: str) -> Changes:
    """The changes of a fault by its `file:function` in this folder. Raises BadInput where there is none."""
    file, _, function = name.partition(":")
    try:
        module = importlib.import_module(f"{__package__}.{file}")
    except ImportError:
        raise BadInput(f"patch = {name!r}: there is no run/faults/{file}.py") from None
    found = getattr(module, function, None)
    if not callable(found):
        raise BadInput(f"patch = {name!r}: run/faults/{file}.py has no {function!r}{nearest(function, vars(module))}")
    made: Changes = found()
    return made
