"""Data quality: prompts, then responses, then rewards, and at last whether the numbers told are those of the samples."""

from flowledger.diagnose.orders.answer import Answer, passed, skipped
from flowledger.diagnose.orders.evidence import Evidence

PROMPTS = ("prompt_length/mean", "prompt_length/max", "dropped_ratio")
RESPONSES = ("response_length/mean", "response_length/max", "truncation_ratio", "abort_ratio", "turns/mean")
REWARDS = ("reward/mean", "reward/std", "reward/min", "reward/max", "zero_variance_groups")


def prompts(evidence: Evidence) -> Answer:
    """Lengths of prompts and what was dropped."""
    return _looked(evidence, PROMPTS)


def responses(evidence: Evidence) -> Answer:
    """Lengths of responses, and how they ended."""
    return _looked(evidence, RESPONSES)


def rewards(evidence: Evidence) -> Answer:
    """The distribution of rewards, and groups without any."""
    return _looked(evidence, REWARDS)


def numbers(evidence: Evidence) -> Answer:
    """Told numbers beside those of the samples: the check of agreement has compared them."""
    compared = [one for one in evidence.findings if one.id == "metrics_agree"]
    return passed(compared[0].message) if compared else skipped()


def _looked(evidence: Evidence, names: tuple[str, ...]) -> Answer:
    figures = list(evidence.figures(*names))
    return passed("; ".join(figures[:3]), *figures[3:]) if figures else skipped()
