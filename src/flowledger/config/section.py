"""The base of every part of a configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration: no unknown keys, never changed after birth."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)
