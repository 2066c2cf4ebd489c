"""What the data supplies: prompts that move on from step to step, and are not cut on their way in."""

from collections import Counter
from itertools import pairwise

from flowledger.diagnose.checks.answers import Breach
from flowledger.diagnose.checks.asked import Answer, Question, asked, number
from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

AHEAD = 2  # times that a prompt may not have been seen more than another: a pass over the data has each once
CUT = 0.1, 2  # share of a step's prompts that have exactly the limit, and how many at least

# What stands before the first token of the response, as rollout has it: masks of later stages say nothing new of a prompt,
# and what an environment wrote later is none. Only of steps of which every sample was recorded.
PROMPTS = f"""
WITH tokens_of AS (
    SELECT step, sample_id, position, any_value(token_id) AS token_id, max(response_mask) AS own FROM tokens
    WHERE source <> 'plan' AND step IS NOT NULL AND coalesce(stage, 'rollout') IN ('prompt', 'rollout') AND {WHOLE} GROUP BY ALL),
begins AS (SELECT step, sample_id, min(position) FILTER (own = 1) AS first FROM tokens_of GROUP BY ALL),
prompts AS (
    SELECT step, sample_id, hash(list(token_id ORDER BY position)) AS prompt FROM tokens_of JOIN begins USING (step, sample_id)
    WHERE position < first AND token_id IS NOT NULL GROUP BY step, sample_id),
whole AS (
    SELECT step FROM samples_merged LEFT JOIN prompts USING (step, sample_id) WHERE source <> 'plan'
    GROUP BY step HAVING count(*) = count(prompt))
SELECT step, list(DISTINCT prompt ORDER BY prompt) AS prompts FROM prompts JOIN whole USING (step) GROUP BY step ORDER BY step
"""


def repeated(ledger: Ledger) -> Answer:
    """A step with the prompts of the step before, while others of the data wait for their turn."""
    rows = ledger.rows(PROMPTS)
    if len(rows) < 2:
        return Answer(
            needs=("all prompts of two steps: record.level = tokens, and record.groups as many as a step has",)
        )
    seen: Counter[int] = Counter(rows[0]["prompts"])
    breaches = []
    for before, row in pairwise(rows):
        seen.update(row["prompts"])
        again = before["prompts"] == row["prompts"] and row["step"] == before["step"] + 1
        if again and max(seen.values()) - min(seen.values()) >= AHEAD:
            breaches.append(
                Breach(
                    step=row["step"], stage="prompt",
                    text=f"the {len(row['prompts'])} recorded prompts are those of step {before['step']}; one was seen "
                    f"{max(seen.values())} times by now, another {min(seen.values())} times",
                )
            )  # fmt: skip
    return Answer(breaches=breaches, seen=len(rows))


# Samples of one group share the prompt.
LENGTHS = f"""
SELECT step, count(*) AS n, count(*) FILTER (length = ?) AS at_limit FROM (
    SELECT step, coalesce(group_id, sample_id) AS one, max(prompt_length) AS length FROM samples_merged
    WHERE prompt_length IS NOT NULL AND source <> 'plan' AND step IS NOT NULL AND {WHOLE} GROUP BY ALL)
GROUP BY step ORDER BY step
"""


def cut(ledger: Ledger) -> Answer:
    """Prompts that are exactly as long as they may be, where those that are longer are cut."""
    limit = number(ledger, "data.max_prompt_tokens")
    if not str(ledger.setting("data.too_long")).startswith("truncate") or limit is None:
        return Answer(needs=("a configuration that cuts prompts: data.too_long = truncate_left",))
    rows = ledger.rows(LENGTHS, [limit])
    if not rows:
        return Answer(needs=("rows of `samples` with prompt_length: record.level = tensors",))
    share, least = CUT
    return Answer(
        seen=sum(row["n"] for row in rows),
        breaches=[
            Breach(
                step=row["step"], stage="prompt",
                text=f"{row['at_limit']} of {row['n']} prompts have exactly data.max_prompt_tokens = {limit} tokens: what was "
                "longer has lost its beginning",
            )
            for row in rows
            if row["at_limit"] >= max(least, share * row["n"])
        ],
    )  # fmt: skip


QUESTIONS = (
    Question(
        id="prompts_repeated", sentence="each step has prompts of its own", ask=repeated,
        source=f"a pass over the data has each prompt once: none is seen {AHEAD} times more than another",
        next_step="look at what moves the data on: the sampler's state, the step or epoch that it is told, a batch that is cached",
    ),
    Question(
        id="prompts_truncated", sentence="prompts are not cut", ask=cut, verdict="warn", confidence=0.8,
        source=f"{CUT[0]:.0%} of a step's prompts, and {CUT[1]} at least, end exactly at the limit",
        next_step="raise data.max_prompt_tokens to the longest prompt, or set data.too_long = skip",
    ),
)  # fmt: skip


def check(ledger: Ledger) -> list[FindingRow]:
    """Whether the policy is asked what the data holds."""
    return asked(ledger, QUESTIONS)
