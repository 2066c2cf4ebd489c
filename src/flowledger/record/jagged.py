"""Batches whose rows have their own lengths, without padding between them (torch.jagged nested tensors)."""

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
    stated = offsets.diff() if cut is None else cut  # cut: of rows that were narrowed where they lie
    lengths: list[int] | None = stated.tolist() if stated.is_cpu else None
    rows = len(offsets) - 1
    longest = max(lengths, default=0) if lengths is not None else _noted(value) or -(-values.shape[0] // max(1, rows))
    tokens = values.shape[0] if lengths is None else sum(lengths)
    return Jagged(values, (rows, longest, *values.shape[1:]), lengths if cut is None else None, tokens)


def _values(value: Any) -> Any:
    """As the tensor itself keeps them: to ask for them goes through torch's dispatcher, for thirty times as long."""
    kept = getattr(value, "_values", None)
    return kept if hasattr(kept, "untyped_storage") else value.values()


def _noted(value: Any) -> int | None:
    noted = getattr(value, "_metadata_cache", {}).get("max_seqlen")
    return None if noted is None else int(noted.shape[0])  # torch keeps it as the size of an empty tensor
