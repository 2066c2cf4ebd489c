"""Typed reads from one `config.json`: the first of several keys, as a count or a flag, or one clear complaint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowledger.flow.errors import BadInput

LARGEST = 2**31  # no size of a model is more


@dataclass(frozen=True, slots=True)
class Values:
    """The keys of one file; null counts as absent."""

    file: Path
    data: Mapping[str, Any]

    def first(self, keys: Sequence[str]) -> Any:
        """The value of the first key that is there; None when none is."""
        return next((self.data[key] for key in keys if self.data.get(key) is not None), None)

    def count(self, keys: Sequence[str]) -> int | None:
        """A whole number above 0; None when no key is there, or it is 0. Raises BadInput for anything else."""
        for key in keys:
            value = self.data.get(key)
            if value is None or (value == 0 and not isinstance(value, bool)):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= LARGEST:
                raise BadInput(f"{self.file}: {key} = {value!r}: must be a whole number from 1 to {LARGEST}")
            return value
        return None

    def needed(self, keys: Sequence[str]) -> int:
        """A count that must be there."""
        value = self.count(keys)
        if value is None:
            raise BadInput(f"{self.file}: missing {' or '.join(keys)}: a whole number above 0")
        return value

    def flag(self, keys: Sequence[str]) -> bool:
        """A true or false; false when no key is there."""
        for key in keys:
            value = self.data.get(key)
            if value is not None:
                if not isinstance(value, bool):
                    raise BadInput(f"{self.file}: {key} = {value!r}: must be true or false")
                return value
        return False

    def words(self, key: str) -> tuple[str, ...]:
        """A list of words; empty when the key is not there."""
        value = self.data.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise BadInput(f"{self.file}: {key} = {value!r}: must be a list of words")
        return tuple(value)

    def numbers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers; empty when the key is not there."""
        value = self.data.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
            raise BadInput(f"{self.file}: {key} = {value!r}: must be a list of whole numbers")
        return tuple(value)
