"""What a reader of a foreign framework hands back: the RunConfig, what it ignored, and what it had to assume."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from flowledger.config.complaints import complaints
from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A framework's own files as one RunConfig. `config.raw` holds the framework's keys, flat and dotted."""

    config: RunConfig
    ignored: tuple[str, ...] = ()  # `key@file:line` of what the user set and no plan depends on
    assumed: tuple[str, ...] = ()  # `key=value` of --assume that were used
    notes: tuple[str, ...] = ()  # what a user should know of how it was read


def build(data: Mapping[str, Any], sources: Mapping[str, str], where: str) -> RunConfig:
    """The RunConfig of a nested dictionary. `sources`: dotted RunConfig key -> `key@file:line` or `key default@verl 0.9.1`.

    Raises BadInput with a line for each fault.
    """
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise BadInput("\n".join(complaints(error, sources, where))) from None
    config._sources.update(sources)
    return config
