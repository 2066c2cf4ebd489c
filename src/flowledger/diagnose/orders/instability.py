"""Instability: the identities of step 0, then data and masks, the rollout-trainer gap, the objective, and at last the optimizer.

What is wrong is said by laws, checks and alarms; the tests here look at what there is to look at, and at values that are not finite.
"""

import re
from collections.abc import Iterable, Mapping
from math import isfinite

from flowledger.diagnose.orders.answer import Answer, failed, passed, skipped, warned
from flowledger.diagnose.orders.evidence import Evidence
from flowledger.tables.metrics import metrics

GAP = (
    "rollout_gap/mean", "rollout_gap/max", "rollout_correction/effective_sample_size", "rollout_correction/kl", "rollout_gap/prob_mean",
    "rollout_correction/k3_kl", "rollout_gap/pearson", "rollout_gap/ppl_ratio",
)  # fmt: skip
# What frameworks tell of the gap without the mean that an alarm judges: held against their healthy ranges.
TOLD_OF_GAP = ("rollout_correction/kl", "rollout_correction/k3_kl", "rollout_gap/prob_mean")
OBJECTIVE = (
    "policy_loss", "kl_loss", "ref_kl", "policy_kl", "clip_ratio", "ratio/max", "entropy", "advantage/mean", "advantage/std",
    "value_loss",
)  # fmt: skip
NOT_FINITE = re.compile(r"\bnan\b|\binf\b|non-?finite|not finite", re.IGNORECASE)
ALARMS = ("metric_not_finite", "loss_not_finite")
IS_NOT_FINITE = re.compile(r"^(\S+) = (?:nan|-?inf)")
OF_OPTIMIZER = re.compile(r"grad|\blr\b|update_ratio|optim")
OPTIMIZER = ("grad_norm", "lr", "update_ratio", "critic_grad_norm", "critic_lr")


def identities(evidence: Evidence) -> Answer:
    """Whether there are log-probs of the first step; the law of that name has looked at them."""
    found = evidence.rows(
        "SELECT count(*) AS n FROM tokens_merged WHERE source <> 'plan' AND old_log_prob IS NOT NULL AND loss_mask = 1"
    )
    seen = sum(row["n"] for row in found)
    return passed(f"{seen} tokens in the loss keep the identities of a first step") if seen else skipped()


def data(evidence: Evidence) -> Answer:
    """Whether there are samples, and what of them is in the loss."""
    found = evidence.rows(
        "SELECT count(*) AS n, count(*) FILTER (dropped_reason IS NULL) AS kept FROM samples_merged WHERE source <> 'plan'"
    )
    seen, kept = (sum(row[key] for row in found) for key in ("n", "kept"))
    return passed(f"{kept} of {seen} samples are trained on") if seen else skipped()


def gap(evidence: Evidence) -> Answer:
    """What rollout and trainer say of the same tokens."""
    found = _finite(evidence, GAP)
    return found if found.verdict != "pass" or evidence.series.get("rollout_gap/mean") else _apart(evidence) or found


def _apart(evidence: Evidence) -> Answer | None:
    """A metric of the gap that has left its healthy range, and has not come back; None where all are within."""
    for name in TOLD_OF_GAP:
        values, row = evidence.series.get(name) or {}, metrics()[name]
        outside = [step for step in sorted(values) if row.is_healthy(values[step]) is False]
        last = [step for step in outside if all(later in outside for later in values if later > step)]
        if len(last) > 1 and row.healthy is not None:
            low, high = row.healthy
            return warned(
                f"{name} is {values[max(values)]:.3g} and outside {low:g} to {high:g} since step {last[0]}: rollout and trainer disagree",
                *evidence.figures(*GAP), step=last[0], confidence=0.6,
            )  # fmt: skip
    return None


def objective(evidence: Evidence) -> Answer:
    """Losses, KL, entropy, ratio and advantages; the first that is not finite, or any other that an alarm names."""
    alarms = [one for one in evidence.findings if one.id in ALARMS and one.verdict == "fail"]
    named = [match[1] for one in alarms for line in one.evidence or () if (match := IS_NOT_FINITE.search(line))]
    others = [name for name in named if name in evidence.series and not OF_OPTIMIZER.search(name)]
    return _finite(evidence, OBJECTIVE, others)


def optimizer(evidence: Evidence) -> Answer:
    """Gradients and learning rate; the first that is not finite, which may have stopped the run."""
    end = evidence.end
    if end is not None and NOT_FINITE.search(end.message):
        return failed(end.message, *(end.evidence or ()), *evidence.figures(*OPTIMIZER), step=end.step, stage=end.stage, rank=end.rank,
                      next_step="look at the samples of that step, and at what was finite before it", confidence=0.6)  # fmt: skip
    return _finite(evidence, OPTIMIZER)


def _finite(evidence: Evidence, names: Iterable[str], others: Iterable[str] = ()) -> Answer:
    """What the metrics of these names are; `others`: looked at for what is not finite alone."""
    there = {name: evidence.series[name] for name in names if evidence.series.get(name)}
    told = {**there, **{name: evidence.series[name] for name in others}}
    broken = [
        (step, name, value) for name, values in told.items() for step, value in values.items() if not isfinite(value)
    ]
    figures = list(evidence.figures(*there))
    if broken:
        step, name, value = min(broken)
        also = [f"{other} is {found} in step {at}" for at, other, found in sorted(broken) if other != name]
        return failed(
            f"{name} is {value} {_since(told[name], step)}", *dict.fromkeys(also[:5]), *figures, step=step, confidence=0.92,
            next_step=f"step {step} is the first: what was finite before it, and which samples did it have",
        )  # fmt: skip
    return passed("; ".join(figures[:4]), *figures[4:]) if there else skipped()


def _since(values: Mapping[int, float], first: int) -> str:
    """`from step 2 on`, where no later number is finite; else `in step 2`."""
    later = [value for step, value in values.items() if step > first]
    return f"from step {first} on" if later and not any(map(isfinite, later)) else f"in step {first}"
