"""What each stage learns of each sample: one row a sample and stage, from tensors of one value a sample.

Content is read only where that waits for no device (CPU tensors, or level `tokens`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowledger.flow.tensors import tensor
from flowledger.flow.words import FINISH_REASONS
from flowledger.ledger.rows import Row, SampleRow, Trained
from flowledger.record.position import Frame

Put = Callable[[Row, Frame, int], None]
_FROM_MASK = {"response_mask": "response_length", "prompt_mask": "prompt_length"}  # a mask that tells a column


class Samples:
    """Collects columns over a stage and writes them when it ends."""

    def __init__(self, put: Put, rank: int) -> None:
        self._put, self._rank = put, rank
        self._known: set[str] = set()  # columns that this step has written
        self._trained: dict[str, list[Trained]] = {}

    def begin_step(self) -> None:
        self._known.clear()
        self._trained.clear()

    def columns(
        self, name: str, value: Any, count: int, facts: Mapping[str, Any], *, again: bool, beside: Mapping[str, Any]
    ) -> dict[str, list[Any]]:
        """The column that a tensor fills, one value a sample; empty when it has none, or (unless `again`) had it.

        `beside`: the tensors of the same call by name.
        """
        column = _FROM_MASK.get(name) or tensor(name).sample_column
        if column is None or column == "sample_id" or (not again and column in self._known):
            return {}
        if name in _FROM_MASK:
            values = _lengths(value, beside.get("attention_mask") if name == "response_mask" else None)
        else:
            values = value.tolist() if value.dim() < 2 or column == "rewards" else value.flatten().tolist()
        spread = _spread(_converted(column, values, facts), count)
        if not spread:
            return {}
        weights = facts.get("reward_weights") if column == "rewards" else None
        return {column: spread} if weights is None else {column: spread, "reward": _weighed(value, weights)}

    def write(self, ids: Sequence[str], columns: dict[str, list[Any]], frame: Frame, now: int) -> None:
        """One row for each sample."""
        self._known.update(columns)
        names = list(columns)
        for sample_id, *values in zip(ids, *columns.values(), strict=True):
            self._put(SampleRow(sample_id=sample_id, **dict(zip(names, values, strict=True))), frame, now)

    def train(self, ids: Sequence[str], frame: Frame, stops: Sequence[int]) -> None:
        """Note that samples go through the update now, with so many columns each."""
        at = (frame.epoch or 0, frame.mini_batch or 0, frame.micro_batch or 0)
        for sample_id, stop in zip(ids, stops, strict=True):
            entry = Trained(epoch=at[0], mini_batch=at[1], rank=self._rank, micro_batch=at[2], stop=stop)
            self._trained.setdefault(sample_id, []).append(entry)

    def end_update(self, frame: Frame, now: int) -> None:
        """Write for each sample when and where it was trained."""
        for sample_id, trained in self._trained.items():
            self._put(SampleRow(sample_id=sample_id, trained=trained), frame, now)
        self._trained = {}


def _lengths(response_mask: Any, attention_mask: Any) -> list[int]:
    """Tokens of each response; with those that an environment wrote, which only an attention mask beside it shows."""
    if response_mask.dim() != 2:
        return []
    rows, width = response_mask.shape
    wide = attention_mask is not None and attention_mask.dim() == 2 and attention_mask.shape[0] == rows
    mask = attention_mask[:, -width:] if wide and attention_mask.shape[1] >= width else response_mask
    lengths: list[int] = mask.count_nonzero(1).tolist()
    return lengths


def _converted(column: str, values: list[Any], facts: Mapping[str, Any]) -> list[Any]:
    if column == "finish_reason":
        return [FINISH_REASONS[code] if 0 <= code < len(FINISH_REASONS) else str(code) for code in values]
    if column == "group_id":
        return [str(number) for number in values]
    if column == "rewards":
        names = facts.get("component_names") or ()
        named = [*map(str, names), *map(str, range(len(names), 1000))]
        return [dict(zip(named, row if isinstance(row, list) else [row], strict=False)) for row in values]
    return values


def _weighed(components: Any, weights: Any) -> list[float]:
    """Weighted sum of each sample's components [B, N_reward], those that failed left out; NaN where all have."""
    sums = (components * weights.to(components.device)).nansum(1)
    sums[components.isnan().all(1)] = float("nan")
    found: list[float] = sums.tolist()
    return found


def _spread(values: list[Any], count: int) -> list[Any]:
    """Per-prompt values repeated over their group; nothing when the numbers do not fit."""
    if not values or count % len(values):
        return []
    times = count // len(values)
    return values if times == 1 else [value for value in values for _ in range(times)]
