"""Data quality: prompts, then responses, then rewards, and at last whether the numbers told are those of the samples."""

from collections.abc import Mapping

from flowledger.diagnose.orders.answer import Answer, passed, skipped
from flowledger.diagnose.orders.evidence import Evidence

# What a step names -> the metrics that show it, any of which will do. Where one of them has none, the step was not looked at.
PROMPTS = {"prompt lengths": ("prompt_length/mean", "prompt_length/max")}
RESPONSES = {
    "response lengths": ("response_length/mean", "response_length/max"),
    "how responses ended": ("truncation_ratio", "response_limit_ratio", "abort_ratio"),
}
REWARDS = {
    "rewards": ("reward/mean",),
    "their spread": ("reward/std", "reward/sample_std", "reward/max"),
    "groups without variance": ("zero_variance_groups", "zero_variance_samples"),
}
MORE_PROMPTS = ("dropped_ratio", "prompt_truncation_ratio")
MORE_RESPONSES = ("turns/mean",)
MORE_REWARDS = ("reward/min", "advantage/std", "advantage/min", "advantage/max")


def prompts(evidence: Evidence) -> Answer:
    """Lengths of prompts and what was dropped."""
    return _looked(evidence, PROMPTS, MORE_PROMPTS)


def responses(evidence: Evidence) -> Answer:
    """Lengths of responses, and how they ended."""
    return _looked(evidence, RESPONSES, MORE_RESPONSES)


def rewards(evidence: Evidence) -> Answer:
    """The distribution of rewards, and groups without any."""
    return _looked(evidence, REWARDS, MORE_REWARDS)


def numbers(evidence: Evidence) -> Answer:
    """Told numbers beside those of the samples: the check of agreement has compared them."""
    compared = [one for one in evidence.findings if one.id == "metrics_agree"]
    return passed(compared[0].message) if compared else skipped()


def _looked(evidence: Evidence, things: Mapping[str, tuple[str, ...]], more: tuple[str, ...]) -> Answer:
    """Passed where each thing has a number; else what was missing, after what is known."""
    found = {thing: list(evidence.figures(*names)) for thing, names in things.items()}
    figures = [*(one for told in found.values() for one in told), *evidence.figures(*more)]
    unseen = [f"{thing}: {' or '.join(things[thing])}" for thing, told in found.items() if not told]
    if not figures or len(unseen) == len(things):
        return skipped()
    if unseen:
        known = "; ".join(told[0] for told in found.values() if told)
        return skipped(*unseen).but(
            message=f"{known}; not known: {', '.join(name for name, told in found.items() if not told)}",
            evidence=tuple(figures),
        )
    leading = [told[0] for told in found.values()]
    return passed("; ".join(leading), *(one for one in figures if one not in leading))
