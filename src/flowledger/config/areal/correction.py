"""AReaL's decoupled loss weights each token by π_proximal / π_behave; `rejection_sampling` says what is thrown away."""

from flowledger.config import correction
from flowledger.config.algorithm import REJECTIONS
from flowledger.config.settings import Draft, Settings

SECTION = "actor.rejection_sampling"
OLDER = ("actor.behave_imp_weight_cap", "actor.behav_imp_weight_cap")  # tokens above it are masked
KINDS = {"ratio": "k1", "kl_k2": "k2", "kl_k3": "k3"}


def corrected(settings: Settings, draft: Draft) -> None:
    """Weights of the decoupled loss (areal/api/cli_args.py::RejectionSamplingConfig)."""
    cap = next((key for key in OLDER if settings.number(key) is not None), None)
    if cap is not None:
        correction.rejected(draft, "token_k1", cap, high=settings.number(cap))
    elif not settings.has(SECTION):
        correction.truncated(draft, "token", "actor.use_decoupled_loss", high=None)
    else:
        _rejection(settings, draft)


def _rejection(settings: Settings, draft: Draft) -> None:
    level, action, metric, agg = (settings.text(f"{SECTION}.{key}") for key in ("level", "action", "metric", "agg"))
    low, high = settings.number(f"{SECTION}.lower"), settings.number(f"{SECTION}.upper")
    kind = f"{'token' if level == 'token' else f'seq_{agg}'}_{KINDS.get(metric or '', '')}"
    if level == "token" and action == "clamp":
        correction.truncated(draft, "token", f"{SECTION}.upper", high=high, low=low)
    elif action == "mask" and kind in REJECTIONS:
        correction.rejected(draft, kind, SECTION, high=high, low=low)
    else:
        settings.notes.append(f"{SECTION}: {action} by {metric} of each {level} is not taken over")
        correction.truncated(draft, "token", "actor.use_decoupled_loss", high=None)
