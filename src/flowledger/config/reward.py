"""What a response is worth: reward components and their limits."""

from typing import Literal

from pydantic import Field, model_validator

from flowledger.config.bounds import LONGEST_NAME, NAME, SECONDS, WEIGHT, File
from flowledger.config.section import Section


class Component(Section):
    """One reward component; the reward of a sample is the weighted sum of its components."""

    name: str = Field(pattern=NAME, max_length=LONGEST_NAME)
    kind: Literal["task", "math_verify", "function", "model", "token_model"]
    path: File | None = None  # function: module:name or file.py:name; model: a directory, or `tiny`
    weight: float = Field(1.0, ge=-WEIGHT, le=WEIGHT)

    @model_validator(mode="after")
    def _path_where_needed(self) -> "Component":
        if self.kind in ("function", "model", "token_model") and not self.path:
            raise ValueError(f"reward component {self.name!r} of kind {self.kind!r} needs a path")
        return self


class Reward(Section):
    """What a response is worth. Rule rewards run in a process of their own, so that a time limit can be kept."""

    components: tuple[Component, ...] = (Component(name="task", kind="task"),)
    timeout_s: float = Field(10.0, gt=0, le=SECONDS)  # per sample and component
    on_error: Literal["drop", "zero"] = "drop"  # a sample whose reward failed: out of the loss, or reward 0

    @model_validator(mode="after")
    def _names_differ(self) -> "Reward":
        names = [component.name for component in self.components]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"reward.components need at least one, with different names; got {names}")
        return self
