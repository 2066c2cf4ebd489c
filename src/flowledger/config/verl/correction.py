"""verl's rollout correction as RunConfig has it: bypass mode, importance weights and rejections.

A threshold of weights is a number, or `low_high` (IcePop). `rollout_rs` names options, `rollout_rs_threshold` one bound for
all of them or one for each; that of a k1 option may be `low_high` too (verl/trainer/ppo/rollout_corr_helper.py).
"""

from typing import Any

from flowledger.config.algorithm import REJECTIONS
from flowledger.config.settings import Draft, Settings
from flowledger.flow.errors import nearest

SECTION = TARGET = "algorithm.rollout_correction"


def correction(settings: Settings, draft: Draft, *, v1: bool) -> None:
    """Bypass mode copies the rollout's log-probs in every trainer, and only V0's family changes the policy loss with it
    (verl/trainer/ppo/v1/trainer_base.py). Raises BadInput where a bound cannot be read."""
    bypass = f"{SECTION}.bypass_mode"
    if settings.flag(bypass):
        draft.put("actor.old_log_prob", False, bypass)
        if v1:
            settings.notes.append(
                f"{settings.origin(bypass)}: this trainer takes the rollout's log-probs for old ones, and neither changes "
                "the policy loss nor weights or rejects anything"
            )
            return
        draft.put("algorithm.policy_loss", "bypass_mode", bypass)
        draft.put(f"{TARGET}.loss", settings.text(f"{SECTION}.loss_type"), f"{SECTION}.loss_type")
    _weights(settings, draft)
    _rejections(settings, draft)


def _weights(settings: Settings, draft: Draft) -> None:
    level, threshold, mean = (f"{SECTION}.rollout_is{name}" for name in ("", "_threshold", "_batch_normalize"))
    if settings.get(level) is None:
        return
    draft.put(f"{TARGET}.importance", settings.text(level), level)
    bounds = settings.text(threshold)
    low, high = (None, None) if bounds is None else _bounds(settings, threshold, bounds)
    draft.put(f"{TARGET}.high", high, threshold)
    draft.put(f"{TARGET}.low", low, threshold)
    draft.put(f"{TARGET}.normalize", settings.flag(mean), mean)


def _rejections(settings: Settings, draft: Draft) -> None:
    options, threshold = f"{SECTION}.rollout_rs", f"{SECTION}.rollout_rs_threshold"
    kinds = list(dict.fromkeys(_listed(settings.text(options))))
    unknown = next((kind for kind in kinds if kind not in REJECTIONS), None)
    if unknown is not None:
        raise settings.bad(options, f"{unknown} is no rejection of verl{nearest(unknown, REJECTIONS)}")
    bounds: list[str | None] = [*_listed(settings.text(threshold))] if kinds else []
    if len(bounds) not in (0, 1, len(kinds)):
        raise settings.bad(threshold, f"should be one bound, or one for each of the {len(kinds)} of {options}")
    each = bounds * len(kinds) if len(bounds) == 1 else bounds or [None for _ in kinds]
    rows = tuple(_rejection(settings, kind, bound) for kind, bound in zip(kinds, each, strict=True))
    draft.put(f"{TARGET}.rejections", rows or None, options, threshold)


def _rejection(settings: Settings, kind: str, bound: str | None) -> dict[str, Any]:
    """One row; without a bound RunConfig's own, and a check says that verl asks for one."""
    if bound is None:
        return {"kind": kind}
    low, high = _bounds(settings, f"{SECTION}.rollout_rs_threshold", bound)
    return {"kind": kind, "high": high, "low": low}


def _bounds(settings: Settings, key: str, text: str) -> tuple[float | None, float]:
    """`2.0` -> (None, 2.0); `0.5_2.0` -> (0.5, 2.0)."""
    first, _, second = text.strip().partition("_")
    try:
        return (float(first), float(second)) if second else (None, float(first))
    except ValueError:
        raise settings.bad(key, f"{text!r} should be a number, or two as `low_high`; use 2.0 or 0.5_2.0") from None


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]
