"""What OpenRLHF does about vLLM's log-probs: 0.11.2 by level, mode and gate; before by one word for all three."""

from flowledger.config import correction
from flowledger.config.settings import Draft, Settings

SECTION = "algo.advantage"
WORDS = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}  # until 0.11.0


def corrected(settings: Settings, draft: Draft) -> None:
    """Weights of PPO's loss (openrlhf/models/loss.py::PolicyLoss); GSPO takes vLLM's log-probs for old ones instead."""
    level, mode, key = _asked(settings)
    if level == "off":
        return
    gate = f"{SECTION}.is_correction_gating"
    if (settings.text(gate) or "ratio") != "ratio":
        settings.notes.append(f"{settings.origin(gate)} = {settings.text(gate)}: this rejection is not taken over")
        correction.truncated(draft, "token", key, high=None)
        return
    low, high, bounds = _bounds(settings)
    if level == "seq":
        correction.rejected(draft, "seq_mean_k1", key, bounds, high=high, low=low)
    elif mode == "clip":
        correction.truncated(draft, "token", key, bounds, high=high, low=low)
    else:
        correction.banded(draft, "token", key, bounds, high=high, low=low)


def _asked(settings: Settings) -> tuple[str, str, str]:
    """Level, mode and the key that asks for it."""
    for switch, kind in (
        (f"{SECTION}.is_correction_enable", f"{SECTION}.is_correction_type"),
        ("older.enable_vllm_is_correction", "older.vllm_is_correction_type"),
    ):
        if settings.flag(switch):
            return *WORDS.get(settings.text(kind) or "tis", WORDS["tis"]), switch
    level = f"{SECTION}.is_correction_level"
    return settings.text(level) or "off", settings.text(f"{SECTION}.is_correction_mode") or "mask", level


def _bounds(settings: Settings) -> tuple[float | None, float | None, str]:
    """LOW HIGH, or HIGH alone."""
    new, older = f"{SECTION}.is_correction_threshold", "older.vllm_is_truncated_threshold"
    key = older if settings.flag("older.enable_vllm_is_correction") else new
    found = settings.get(key)
    values = [float(value) for value in (found if isinstance(found, list | tuple) else [found]) if value is not None]
    return values[-2] if len(values) > 1 else None, values[-1] if values else None, key
