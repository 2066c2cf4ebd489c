"""Samples that are there twice: one id for two, or one response under two ids that chance does not make."""

from collections import Counter
from collections.abc import Iterator
from math import log

from flowledger.diagnose.checks.answers import Breach, answer
from flowledger.diagnose.checks.sequences import TOKENS, Told, told
from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

SENTENCE = "each sample of a step is one of its own"
IDS = "no two steps give a sample the same id"
UNLIKELY = -12.0  # nats: what happens to a step less than once in 100,000 times


def check(ledger: Ledger) -> list[FindingRow]:
    """`samples_repeated` and `ids_reused`."""
    data = told(ledger)
    seen = [one for one in data.sequences if one.has("token_id") and one.has("rollout_log_prob")]
    greedy = data.setting("rollout.top_k") == 1 or float(data.setting("rollout.temperature", 1.0)) < 0.2
    lacks = () if seen and not greedy else ("tokens that were sampled by chance",) if greedy else (TOKENS,)
    return [
        answer(
            "samples_repeated", SENTENCE, seen=len(seen), breaches=[] if greedy else list(_alike(data)), needs=lacks,
            cause="rows were written over others, or one sample was gathered twice",
            next_step="look at how samples are gathered, padded to a multiple, or drawn anew",
        ),
        *_reused(ledger, data),
    ]  # fmt: skip


def _reused(ledger: Ledger, data: Told) -> Iterator[FindingRow]:
    """Of our own loop, whose ids are never used twice; others may carry a sample from one step into the next."""
    if not data.ours:
        return
    rows = ledger.rows(
        "SELECT sample_id, list(DISTINCT step ORDER BY step) AS steps FROM samples WHERE stage = 'prompt' AND step IS NOT NULL "
        f"AND {WHOLE} GROUP BY sample_id HAVING count(DISTINCT step) > 1 ORDER BY min(step) LIMIT 20"
    )
    breaches = [
        Breach(
            step=row["steps"][1],
            stage="prompt",
            text=f"sample {row['sample_id']} was one of step {row['steps'][0]} already",
        )
        for row in rows
    ]
    yield answer(
        "ids_reused",
        IDS,
        seen=len(data.samples),
        breaches=breaches,
        cause="what is kept by sample id is that of another step",
    )


def _alike(data: Told) -> Iterator[Breach]:
    """Equal tokens with equal log-probs, of a response that no two of the step's samples say by chance: e^said a pair."""
    known: dict[tuple[object, ...], str] = {}
    of_step = Counter(one.step for one in data.sequences)
    for one in data.sequences:
        own = [at for at, on in enumerate(one["response_mask"]) if on]
        said = [one["rollout_log_prob"][at] for at in own]
        pairs = of_step[one.step] * (of_step[one.step] - 1) / 2
        if not own or None in said or not pairs or sum(said) + log(pairs) > UNLIKELY:
            continue
        content = (one.step, *(one["token_id"][at] for at in own), *said)
        other = known.setdefault(content, one.sample_id)
        if other != one.sample_id:
            yield Breach(
                step=one.step,
                stage="rollout",
                text=f"samples {other} and {one.sample_id} have the same {len(own)} tokens with the same log-probs (chance e^{sum(said):.0f})",
            )
