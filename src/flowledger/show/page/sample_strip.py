"""The tokens of a sample column by column, and the gaps between its log-probs."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowledger.show.page.book import Rows, Text, text

MOST = 4096  # tokens of one sample
LONGEST = 6000  # characters of a text

# Name -> (of which columns it is the difference): how far the trainer, the update and the reference are apart.
GAPS = {
    "old_rollout": ("old_log_prob", "rollout_log_prob"),
    "new_old": ("new_log_prob", "old_log_prob"),
    "ref_new": ("ref_log_prob", "new_log_prob"),
    "new_rollout": ("new_log_prob", "rollout_log_prob"),  # where the old policy has no pass of its own
}
WHOLE = ("position", "token_id", "text", "attention_mask", "response_mask", "loss_mask", "clipped")
NUMBERS = (
    "rollout_log_prob", "old_log_prob", "ref_log_prob", "new_log_prob", "kl", "reward", "value", "return", "advantage", "weight",
    "ratio", "entropy", "loss_share",
)  # fmt: skip


def strip(tokens: Rows) -> dict[str, Any]:
    """`columns`: name -> values, of what is known of some token; `gaps` likewise; `left_out`: tokens beyond MOST."""
    kept = tokens[:MOST]
    columns = {name: [row[name] for row in kept] for name in WHOLE}
    columns |= {name: [_short(row[name]) for row in kept] for name in NUMBERS}
    known = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    gaps = {name: [_gap(row, pair) for row in kept] for name, pair in GAPS.items() if set(pair) <= known.keys()}
    if "old_rollout" in gaps:
        gaps.pop("new_rollout", None)
    return {"count": len(tokens), "columns": known, "gaps": gaps, "left_out": max(0, len(tokens) - MOST)}


def texts(tokens: Rows) -> list[dict[str, Any]]:
    """A dump's prompt and response, each in one piece, which is no token; empty where there are tokens."""
    if any(row["token_id"] is not None or row["attention_mask"] is not None for row in tokens):
        return []
    whole = [(row["position"], row["text"]) for row in tokens if row["text"] is not None]
    return [{"position": at, "text": one[:LONGEST], "left_out": max(0, len(one) - LONGEST)} for at, one in whole]


def cut(made: Mapping[str, Any], run: str, sample: str) -> Text:
    """The sentence on tokens that are not here."""
    return text(
        f"The first {MOST:,} of {made['count']:,} tokens are here; all of them: flowledger sample {run} {sample} --csv",
        f"此处有前 {MOST:,} 个 token，共 {made['count']:,} 个；全部：flowledger sample {run} {sample} --csv",
    )


def _gap(row: Mapping[str, Any], pair: Sequence[str]) -> float | None:
    a, b = (row[name] for name in pair)
    return None if a is None or b is None else _short(a - b)


def _short(value: float | None) -> float | None:
    """Nine digits: as many as single precision has, and no more."""
    return None if value is None else float(f"{value:.9g}")
