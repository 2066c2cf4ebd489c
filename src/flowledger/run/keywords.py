"""Functions of the user are called with those words, of the ones on offer, that their signature accepts. No torch."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from flowledger.flow.errors import BadInput
from flowledger.run.exceptions import told


def accepted(function: Callable[..., Any], words: Sequence[str], *, key: str) -> tuple[str, ...]:
    """Those of `words` that a function takes by name; all of them where it has **keywords.

    Raises BadInput, in the name of the setting `key`, where its signature is not known.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise BadInput(f"{key}: what it can be called with is not known ({told(error)}); wrap it in a def") from None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return tuple(words)
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    return tuple(word for word in words if word in named)
