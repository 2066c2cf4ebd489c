"""Batches whose rows have their own lengths, without padding between them (torch.jagged nested tensors)."""

from itertools import pairwise
from typing import Any, NamedTuple


class Jagged(NamedTuple):
    """What is known of one without waiting for a device."""

    values: Any  # [T, ...], all rows one after another
    shape: tuple[int, ...]  # as it would be padded to its longest row
    lengths: list[int] | None  # of the rows; None on a device, and where something lies between the rows
    tokens: int  # of all rows together

    @property
    def filled(self) -> float | None:
        """The share of the padded shape that holds a value."""
        whole = self.shape[0] * self.shape[1]
        return self.tokens / whole if whole else None


def of(value: Any) -> Jagged:
    """A nested tensor [B, j, ...] as it stands. On a device the longest row is taken from what torch has noted, else as even."""
    values, offsets, cut = _values(value), value.offsets(), value.lengths()
    rows = len(offsets) - 1
    if not (offsets if cut is None else cut).is_cpu:
        longest, lengths, tokens = _noted(value) or -(-values.shape[0] // max(1, rows)), None, values.shape[0]
    else:  # read as it stands: torch's difference of two rows takes ten times as long as one in Python
        lengths = _between(offsets.tolist()) if cut is None else cut.tolist()  # cut: rows were narrowed where they lie
        longest, tokens = max(lengths, default=0), sum(lengths)
    return Jagged(values, (rows, longest, *values.shape[1:]), lengths if cut is None else None, tokens)


def _between(offsets: list[int]) -> list[int]:
    return [end - start for start, end in pairwise(offsets)]


def _values(value: Any) -> Any:
    """As the tensor itself keeps them: to ask for them goes through torch's dispatcher, for thirty times as long."""
    kept = getattr(value, "_values", None)
    return kept if hasattr(kept, "untyped_storage") else value.values()


def _noted(value: Any) -> int | None:
    noted = getattr(value, "_metadata_cache", {}).get("max_seqlen")
    return None if noted is None else int(noted.shape[0])  # torch keeps it as the size of an empty tensor
