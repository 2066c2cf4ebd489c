"""Functions of the user are called with those words, of the ones on offer, that their signature accepts. No torch."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from flowledger.flow.errors import BadInput
from flowledger.run.exceptions import told


def accepted(function: Callable[..., Any], words: Sequence[str], *, key: str) -> tuple[str, ...]:
    """Those of `words` that a function takes by name; all of them where it has **keywords.

    Raises BadInput, in the name of the setting `key`, where its signature is not known or asks for anything else, and
    where it is async.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise BadInput(f"{key}: what it can be called with is not known ({told(error)}); wrap it in a def") from None
    if inspect.iscoroutinefunction(function):
        raise BadInput(f"{key} is an async function; give one that returns its answer, with asyncio.run inside")
    asked = [what for parameter in parameters if (what := _not_on_offer(parameter, words))]
    if asked:
        raise BadInput(f"{key} cannot be called with {', '.join(words)} by name: it asks for {', '.join(asked)}")
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return tuple(words)
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    return tuple(word for word in words if word in named)


def _not_on_offer(parameter: inspect.Parameter, words: Sequence[str]) -> str | None:
    """What a parameter wants that a call by name with `words` cannot give; None where it is content."""
    if parameter.default is not parameter.empty or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return None
    if parameter.kind is parameter.POSITIONAL_ONLY:
        return f"'{parameter.name}' by position"
    return None if parameter.name in words else f"'{parameter.name}'"
