"""How readers of other frameworks put down a correction of rollout log-probs: weights, and what they throw away.

Frameworks truncate weights, set those outside a band to 0, or drop whole responses by the geometric mean of their ratios.
A truncation from below has no counterpart in a RunConfig, and a note says so.
"""

from flowledger.config.bounds import WEIGHT
from flowledger.config.settings import Draft

TARGET = "algorithm.rollout_correction"
NO_HIGH = WEIGHT  # never cut off
NO_LOW = 1e-9  # below the smallest weight there is, e^-20: a band without a lower end


def truncated(draft: Draft, level: str, *keys: str, high: float | None, low: float | None = None) -> None:
    """Weights of each `token` or of the whole `sequence`, at most `high`."""
    _weights(draft, level, *keys, high=high)
    if low:
        draft.settings.notes.append(f"{keys[0]}: weights are cut off at {low} from below too, which is not taken over")


def banded(draft: Draft, level: str, *keys: str, high: float | None, low: float | None) -> None:
    """Weights outside [low, high] become 0 (IcePop)."""
    _weights(draft, level, *keys, high=high)
    draft.put(f"{TARGET}.low", _below(low, high), *keys)


def rejected(draft: Draft, kind: str, *keys: str, high: float | None, low: float | None = None) -> None:
    """Token weights as they are, after what is outside the bounds of a rejection is masked (k1: of the ratio)."""
    _weights(draft, "token", *keys, high=None)
    bounds = {"low": _below(low, high)} if kind.endswith("k1") else {}
    row = {"kind": kind, "high": NO_HIGH if high is None else high, **bounds}
    draft.put(f"{TARGET}.rejections", (row,), *keys)


def _weights(draft: Draft, level: str, *keys: str, high: float | None) -> None:
    draft.put(f"{TARGET}.importance", level, *keys)
    draft.put(f"{TARGET}.high", NO_HIGH if high is None else high, *keys)


def _below(low: float | None, high: float | None) -> float:
    """The lower end of a band; one that is empty is what `flowledger check` reports."""
    return min(low or NO_LOW, NO_HIGH if high is None else high)
