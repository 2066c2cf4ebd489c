"""What rewards pay for: that it is not length, and that their scale stays.

That they say nothing at all (one reward for all, groups without variance) is an alarm: `reward_stuck`.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from flowledger.diagnose.checks.answers import Breach
from flowledger.diagnose.checks.asked import Answer, Question, asked
from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

FITS = 0.95, 16  # part of the variance of rewards that a line in length explains, and samples of two steps
LENGTHS = 3  # different ones, for a line to mean anything
SCALE = 20.0, 16  # times the largest |reward| of all steps before, and samples that those must have

ROWS = f"""
SELECT step, reward, response_length AS length FROM samples_merged
WHERE reward IS NOT NULL AND isfinite(reward) AND source <> 'plan' AND step IS NOT NULL AND {WHOLE} ORDER BY step
"""
NEEDS = "rows of `samples` with reward: record.level = tensors"

Rows = Sequence[dict[str, Any]]
Step = tuple[int, Rows]


def steps_of(ledger: Ledger) -> list[Step]:
    """Step by step the reward and the length of its samples."""
    return [(step, list(rows)) for step, rows in groupby(ledger.rows(ROWS), key=lambda row: row["step"])]


def lengths(steps: Sequence[Step]) -> Answer:
    """Rewards that a line in response length explains, in each of two steps in a row."""
    told = [(step, [row for row in rows if row["length"] is not None]) for step, rows in steps]
    fits = [explained(rows) for _, rows in told]
    breaches: list[Breach] = []
    for at in range(1, len(told)):
        (before, old), (step, new) = told[at - 1 : at + 1]
        if step == before + 1 and len(old) + len(new) >= FITS[1] and min(fits[at - 1 : at + 1]) >= FITS[0]:
            breaches.append(
                Breach(
                    step=step, stage="reward",
                    text=f"response length explains {fits[at]:.0%} of the variance of the reward, {fits[at - 1]:.0%} in the step before",
                )
            )  # fmt: skip
    enough = len(told) > 1 and any(rows for _, rows in told)
    return Answer(
        breaches=breaches, seen=len(told), needs=() if enough else (f"{NEEDS}, and response_length, of two steps",)
    )


def explained(rows: Rows) -> float:
    """r² of reward and length; 0 where all rewards are the same, or there are too few lengths."""
    if len({row["length"] for row in rows}) < LENGTHS:
        return 0.0
    xs, ys = [float(row["length"]) for row in rows], [float(row["reward"]) for row in rows]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    xx, yy = sum((x - mean_x) ** 2 for x in xs), sum((y - mean_y) ** 2 for y in ys)
    xy = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return xy * xy / (xx * yy) if xx and yy else 0.0


def scales(steps: Sequence[Step]) -> Answer:
    """The largest |reward| of a step against that of all steps before."""
    breaches: list[Breach] = []
    before, samples = 0.0, 0
    times, least = SCALE
    for step, rows in steps:
        largest = max(abs(row["reward"]) for row in rows)
        if samples >= least and before and largest > times * before:
            breaches.append(
                Breach(
                    step=step, stage="reward",
                    text=f"a reward is {largest:.3g} in size, and the largest of the {samples} before was {before:.3g}",
                )
            )  # fmt: skip
        before, samples = max(before, largest), samples + len(rows)
    return Answer(breaches=breaches, seen=samples, needs=() if len(steps) > 1 else (f"{NEEDS}, of two steps",))


QUESTIONS = (
    Question(
        id="reward_is_length", sentence="rewards are no function of length", ask=lengths, verdict="warn", confidence=0.8,
        source=f"r² of reward and response length of {FITS[0]} in each of two steps in a row, {FITS[1]} samples at least",
        next_step="read the longest and the shortest responses beside their rewards; normalise the reward by length, or see "
        "what the grader counts",
    ),
    Question(
        id="reward_scale_jumps", sentence="the scale of rewards stays", ask=scales, verdict="warn", confidence=0.8,
        source=f"{SCALE[0]:g} times the largest |reward| of all steps before, of {SCALE[1]} samples at least",
        next_step="see what changed in the reward: logits in the place of probabilities, the weight of a component, an outlier",
    ),
)  # fmt: skip


def check(ledger: Ledger) -> list[FindingRow]:
    """Whether rewards pay for what they are meant to."""
    return asked(ledger, QUESTIONS, steps_of(ledger))
