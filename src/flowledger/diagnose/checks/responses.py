"""What the policy said: copies that chance cannot explain, one text for every prompt, and texts without a word.

Two responses of one step may be equal. How likely that is says the log-prob under which they were sampled: two samples
that nobody copied agree with probability exp(Σ rollout_log_prob) of one of them.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from flowledger.diagnose.checks.answers import Breach
from flowledger.diagnose.checks.asked import Answer, Question, asked, number
from flowledger.diagnose.checks.sequences import TOKENS, Told, Trace, told
from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

CHANCE = math.log(1e-6)  # of all pairs of a step together: what is rarer than that was not drawn
WORDS = 2  # tokens of a response that says something, its end included
FEW = 8  # samples in a row of which none says anything, or all the same
SAME = 4  # tokens of a text that is no answer to several prompts by chance: `yes` and its end are 2
# Where other frameworks say at what temperature they sample. Below 1 an engine's log-probs may be those of 1, and equal
# responses likelier than they say.
TEMPERATURES = ("rollout.temperature", "actor_rollout_ref.rollout.temperature", "temperature")

SAMPLES = "rows of `samples` with response_length: record.level = tensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One recorded response."""

    step: int
    sample: str
    group: str | None
    ids: tuple[int, ...]
    log_prob: float | None  # of all of it, under the distribution that it was drawn from


def said(ledger: Ledger) -> list[list[Said]]:
    """The recorded responses, step by step."""
    known = told(ledger)
    trusted = known.ours or all((number(ledger, key) or 1.0) >= 1 for key in TEMPERATURES)
    found = [one for sequence in known.sequences if (one := _said(sequence, known, trusted)) is not None]
    return [list(one) for _, one in groupby(found, key=lambda one: one.step)]


def _said(sequence: Trace, known: Told, trusted: bool) -> Said | None:
    """What the policy said in one recorded sample; None where that was not recorded, or is nothing."""
    own = [
        (token, log_prob)
        for token, mask, log_prob in zip(
            sequence["token_id"], sequence["response_mask"], sequence["rollout_log_prob"], strict=True
        )
        if mask == 1 and token is not None
    ]
    if not own:
        return None
    log_probs = [log_prob for _, log_prob in own]
    sample = known.samples.get((sequence.step, sequence.sample_id))
    return Said(
        step=sequence.step, sample=sequence.sample_id, group=sample.group_id if sample else None,
        ids=tuple(token for token, _ in own), log_prob=sum(log_probs) if trusted and None not in log_probs else None,
    )  # fmt: skip


def copied(steps: Sequence[Sequence[Said]]) -> Answer:
    """Pairs of equal responses in one step that were not drawn."""
    known = [[one for one in step if one.log_prob is not None] for step in steps]
    if not any(known):
        return Answer(needs=(f"{TOKENS}, and rollout_log_prob",))
    breaches = []
    for step in known:
        pairs = len(step) * (len(step) - 1) / 2
        alike = [same for same in _equal(step) if (same[0].log_prob or 0.0) + math.log(max(1.0, pairs)) < CHANCE]
        if alike:
            most = max(alike, key=len)
            where = "of one prompt" if len({one.group for one in most}) == 1 else "of different prompts"
            breaches.append(
                Breach(
                    step=most[0].step, stage="rollout",
                    text=f"samples {', '.join(one.sample for one in most[:4])} {where} are the same "
                    f"{len(most[0].ids)} tokens, whose chance was exp({most[0].log_prob:.1f})",
                )
            )  # fmt: skip
    return Answer(breaches=breaches, seen=sum(map(len, known)))


def collapsed(steps: Sequence[Sequence[Said]]) -> Answer:
    """Steps in which all responses to several prompts are one and the same text."""
    several = [step for step in steps if len({one.group for one in step}) > 1]
    if not several:
        return Answer(needs=(f"{TOKENS}, of two groups at least: record.groups = 2",))
    breaches = [
        Breach(
            step=step[0].step, stage="rollout",
            text=f"all {len(step)} recorded responses to {len({one.group for one in step})} prompts are the "
            f"same {len(step[0].ids)} tokens",
        )
        for step in several
        if len({one.ids for one in step}) == 1 and len(step) >= FEW and len(step[0].ids) >= SAME
    ]  # fmt: skip
    return Answer(breaches=breaches, seen=len(several))


def _equal(step: Sequence[Said]) -> Iterator[list[Said]]:
    by_text: dict[tuple[int, ...], list[Said]] = defaultdict(list)
    for one in step:
        by_text[one.ids].append(one)
    return (same for same in by_text.values() if len(same) > 1)


LENGTHS = f"""
SELECT step, count(*) AS n, count(*) FILTER (response_length < {WORDS}) AS silent FROM samples_merged
WHERE response_length IS NOT NULL AND source <> 'plan' AND {WHOLE} GROUP BY step ORDER BY step
"""


def silent(ledger: Ledger) -> Answer:
    """Steps without a word, one after the other, until enough samples are together."""
    if (number(ledger, "rollout.max_response_tokens") or math.inf) < WORDS:
        return Answer(needs=(f"responses that may have {WORDS} tokens: rollout.max_response_tokens",))
    rows = ledger.rows(LENGTHS)
    if not rows:
        return Answer(needs=(SAMPLES,))
    breaches, together = [], 0
    for row in rows:
        together = together + row["n"] if row["silent"] == row["n"] else 0
        if together >= FEW:
            breaches.append(
                Breach(
                    step=row["step"], stage="rollout",
                    text=f"all {row['n']} responses end with their first token",
                )
            )  # fmt: skip
    return Answer(breaches=breaches, seen=sum(row["n"] for row in rows))


ON_TOKENS = (
    Question(
        id="responses_copied", sentence="equal responses are as rare as their log-probs say", ask=copied,
        source=f"two draws agree with the probability of one; exp({CHANCE:.1f}) for all pairs of a step",
        next_step="see that every sample has random numbers of its own (seeds of engines and requests), that temperature "
        "reaches the engine, and that no row is copied to another",
    ),
    Question(
        id="responses_collapsed", sentence="different prompts have different responses", ask=collapsed,
        source=f"all recorded responses of a step, {FEW} at least of two prompts, are the same {SAME} tokens or more", confidence=0.9,
        next_step="look at entropy and at what the reward likes in this text; go back to a checkpoint before it",
    ),
)  # fmt: skip
ON_SAMPLES = (
    Question(
        id="responses_empty", sentence="responses say something", ask=silent, verdict="warn", confidence=0.9,
        source=f"all responses of a step, {FEW} in a row at least, have no token but their end",
        next_step="look at the end of the prompt (chat template, generation prompt), and at the stop tokens",
    ),
)  # fmt: skip


def check(ledger: Ledger) -> list[FindingRow]:
    """Whether responses are what a policy can have sampled."""
    return [*asked(ledger, ON_TOKENS, said(ledger)), *asked(ledger, ON_SAMPLES)]
