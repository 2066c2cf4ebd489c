"""slime's weights of the rollout's log-probs: truncated, unless a function of the user's own makes them.

Facts: slime/backends/megatron_utils/loss.py.
"""

from flowledger.config import correction
from flowledger.config.settings import Draft, Settings

ICEPOP = "icepop_function"  # beside slime's own truncation in the same file


def corrected(settings: Settings, draft: Draft) -> None:
    if not settings.flag("use_tis"):
        return
    own = settings.text("custom_tis_function_path")
    put = correction.banded if own and own.endswith(ICEPOP) else correction.truncated
    if own and put is correction.truncated:
        settings.notes.append(f"custom_tis_function_path = {own}: its weights are taken for truncated ones")
    put(draft, "token", "use_tis", "tis_clip", high=settings.number("tis_clip"), low=settings.number("tis_clip_low"))
