"""How work is dealt to ranks, micro-batches and slots, and how much of a step is spent on writing checkpoints.

What is possible is computed from the same samples: a deal is bad where a plain one would have been much better.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowledger.diagnose.checks.answers import Breach
from flowledger.diagnose.checks.asked import Answer, Question, asked, number
from flowledger.diagnose.missing import WHOLE
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

UNEVEN = 0.1, 0.5  # tokens of the fullest rank above the mean, and the part of that which a plain deal leaves at most
MORE = 2  # micro-batches more than the limits ask for
WRITING = 0.3, 1.0  # share of the time from one checkpoint to the next that goes into it, and seconds at least

SAMPLES = f"""
WITH places AS (SELECT rank, any_value(coordinates['dp']) AS dp FROM processes GROUP BY rank)
SELECT step, sample_id, prompt_length + response_length AS length, coalesce(dp, one.rank) AS rank, one.mini_batch, one.micro_batch
FROM (
    SELECT step, sample_id, prompt_length, response_length, unnest(trained) AS one FROM samples_merged
    WHERE source <> 'plan' AND step IS NOT NULL AND trained IS NOT NULL AND {WHOLE})
LEFT JOIN places ON places.rank = one.rank
WHERE one.epoch = 0 AND one.cp_slice = 0 AND prompt_length + response_length IS NOT NULL
ORDER BY step, one.mini_batch, one.rank, one.micro_batch, TRY_CAST(sample_id AS BIGINT)
"""
REJECTED = "SELECT DISTINCT step FROM samples WHERE dropped_reason = 'rejected' AND step IS NOT NULL"
NEEDS = "rows of `samples` with lengths and `trained`: record.level = tensors"

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """A run, and which data-parallel rank trained on which samples in the first epoch of each step."""

    ledger: Ledger
    samples: Sequence[Row]

    @property
    def ours(self) -> bool:
        """Whether it is a run of flowledger's own loop, whose rules are known."""
        return self.ledger.directory.manifest.framework == "flowledger"

    def by(self, *columns: str) -> dict[tuple[Any, ...], list[Row]]:
        """The samples with the same values of these columns together."""
        found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
        for row in self.samples:
            found[tuple(row[column] for column in columns)].append(row)
        return found


def dealt(of: Work) -> Answer:
    """Tokens of the ranks, against the same samples dealt out by length, one to each rank and back again."""
    degree = of.ledger.mesh.get("dp", 1)
    if degree < 2 or not of.samples:
        return Answer(needs=(f"{NEEDS}, of data-parallel ranks: mesh.dp > 1",))
    above, left = UNEVEN
    breaches, seen = [], 0
    for key, rows in of.by("step", *(("mini_batch",) if of.ours else ())).items():
        tokens: dict[int, int] = defaultdict(int)
        for row in rows:
            tokens[row["rank"]] += row["length"]
        ranks = max(degree, len(tokens))
        mean, worst = sum(tokens.values()) / ranks, max(tokens, key=lambda rank: tokens[rank])
        excess, possible = tokens[worst] - mean, max(_plain([row["length"] for row in rows], ranks)) - mean
        seen += 1
        if excess > above * mean and possible < left * excess:
            where = f"mini-batch {key[1]}: " if of.ours else ""
            breaches.append(
                Breach(
                    step=key[0], stage="update_actor", rank=worst,
                    text=f"{where}rank {worst} trains on {tokens[worst]} tokens and the mean is {mean:.0f}; dealt by length it "
                    f"would be {mean + possible:.0f}",
                )
            )  # fmt: skip
    return Answer(breaches=breaches, seen=seen)


def _plain(lengths: Sequence[int], ranks: int) -> list[int]:
    """Tokens of each rank where the longest are dealt first, from the first rank to the last and back."""
    tokens = [0] * ranks
    for at, length in enumerate(sorted(lengths, reverse=True)):
        turn, place = divmod(at, ranks)
        tokens[place if turn % 2 == 0 else ranks - 1 - place] += length
    return tokens


def micro_batches(of: Work) -> Answer:
    """Micro-batches of a mini-batch, against those that the limits ask for on the rank that needs most."""
    limits = {one: number(of.ledger, f"actor.micro_batch.{one}") for one in (*LIMITS, "max_bytes")}
    known = of.ours and not limits["max_bytes"] and any(limits[one] for one in LIMITS)
    if not known or not of.samples:
        return Answer(needs=(f"{NEEDS}, and limits of micro-batches: actor.micro_batch of flowledger's own loop",))
    breaches = []
    thinned = {row["step"] for row in of.ledger.rows(REJECTED)}  # after they were cut
    minis = {key: rows for key, rows in of.by("step", "mini_batch").items() if key[0] not in thinned}
    for (step, mini), rows in minis.items():
        lengths: dict[int, list[int]] = defaultdict(list)
        for row in sorted(rows, key=lambda row: int(row["sample_id"])):
            lengths[row["rank"]].append(row["length"])
        made = max(len({row["micro_batch"] for row in rows if row["rank"] == rank}) for rank in lengths)
        needed = max(_needed(mine, limits) for mine in lengths.values())
        if made >= needed + MORE:
            breaches.append(
                Breach(
                    step=step, stage="update_actor",
                    text=f"mini-batch {mini} goes through {made} micro-batches of {sum(map(sum, lengths.values())) / made:.0f} tokens; "
                    f"the limits {', '.join(f'{one} = {limits[one]}' for one in LIMITS if limits.get(one))} ask for {needed}",
                )
            )  # fmt: skip
    return Answer(breaches=breaches, seen=len(minis))


LIMITS = ("samples", "max_tokens", "max_padded_tokens")


def _needed(lengths: Sequence[int], limits: Mapping[str, Any]) -> int:
    """Micro-batches where each takes samples in their order until the next would break a limit."""
    made, mine = 0, list[int]()
    for length in lengths:
        more = [*mine, length]
        sizes = (len(more), sum(more), len(more) * max(more))
        if made and all(
            limits.get(one) is None or size <= limits[one] for one, size in zip(LIMITS, sizes, strict=True)
        ):
            mine = more
        else:
            made, mine = made + 1, [length]
    return made


# Running and waiting are told together, one after the other.
SLOTS = """
SELECT one.step, one.process, any_value(one.rank) AS rank, count(*) AS n, max(one.value) AS most,
    count(*) FILTER (two.value > 0 AND one.value < ?) AS idle, min(one.value) FILTER (two.value > 0) AS least
FROM metrics AS one JOIN metrics AS two ON one.process = two.process AND two.seq = one.seq + 1
WHERE one.name = 'rollout/running' AND two.name = 'rollout/waiting' AND one.source <> 'plan' AND one.step IS NOT NULL
    AND one.step NOT IN (SELECT step FROM cut_steps)
GROUP BY one.step, one.process ORDER BY one.step
"""


def slots(of: Work) -> Answer:
    """Decode steps in which samples wait for a slot and slots are empty."""
    most = number(of.ledger, "rollout.max_running")
    rows = of.ledger.rows(SLOTS, [most]) if of.ours and most else []
    if not rows:
        return Answer(
            needs=("decode steps with samples running and waiting, and a number of slots: rollout.max_running",)
        )
    return Answer(
        seen=sum(row["n"] for row in rows),
        breaches=[
            Breach(
                step=row["step"], stage="rollout", rank=row["rank"],
                text=f"{row['idle']} of {row['n']} decode steps run {row['least']:.0f} samples while others wait; there are "
                f"rollout.max_running = {most} slots",
            )
            for row in rows
            if row["idle"]
        ],
    )  # fmt: skip


TIMES = f"""
SELECT step, max(seconds) AS step_seconds, (SELECT max(seconds) FROM own_seconds AS own
    WHERE own.step = step_seconds.step AND stage = 'checkpoint' AND source <> 'plan') AS writing
FROM step_seconds WHERE source <> 'plan' AND step IS NOT NULL AND {WHOLE} GROUP BY step ORDER BY step
"""


def writing(of: Work) -> Answer:
    """The time that a checkpoint takes, of all the time since the one before."""
    rows = of.ledger.rows(TIMES)
    if sum(row["writing"] is not None for row in rows) < 2:
        return Answer(needs=("two checkpoints: checkpoint.every_steps",))
    share, least = WRITING
    spent, many = 0.0, 0
    breaches = []
    for row in rows:
        spent += row["step_seconds"]
        if row["writing"] is None:
            continue
        many += 1
        if many > 1 and row["writing"] > max(least, share * spent):
            breaches.append(
                Breach(
                    step=row["step"], stage="checkpoint",
                    text=f"a checkpoint takes {row['writing']:.1f} s, {row['writing'] / spent:.0%} of the time since the one before",
                )
            )  # fmt: skip
        spent = 0.0
    return Answer(breaches=breaches, seen=many)


QUESTIONS = (
    Question(
        id="samples_dealt_unevenly", sentence="samples are dealt to ranks by their tokens", ask=dealt, verdict="warn",
        source=f"the fullest rank {UNEVEN[0]:.0%} above the mean, where dealing by length leaves less than half of that",
        next_step="balance by tokens before the mini-batches are cut (verl: trainer.balance_batch)", confidence=0.9,
    ),
    Question(
        id="micro_batches_too_small", sentence="micro-batches are as full as their limits allow", ask=micro_batches, verdict="warn",
        source=f"{MORE} micro-batches more than filling them one after the other makes",
        next_step="see that the limits reach the split: tokens without padding, of all ranks alike",
    ),
    Question(
        id="slots_idle", sentence="no slot is empty while samples wait", ask=slots, verdict="warn",
        source="samples are admitted as slots free",
        next_step="see what holds the scheduler back: its own limit, the KV cache, requests that come too late",
    ),
    Question(
        id="checkpoints_too_slow", sentence="checkpoints take little of the time", ask=writing, verdict="warn", confidence=0.8,
        source=f"{WRITING[0]:.0%} of the time since the checkpoint before, and {WRITING[1]:g} s",
        next_step="write less often, or aside: an asynchronous save copies to host memory and goes on",
    ),
)  # fmt: skip


def check(ledger: Ledger) -> list[FindingRow]:
    """Whether time is lost on how work is dealt."""
    return asked(ledger, QUESTIONS, Work(ledger, ledger.rows(SAMPLES)))
