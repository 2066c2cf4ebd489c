"""Imbalance: tokens of ranks, then how batches are cut, then what the axes wait for, and at last queues and stragglers.

What takes no noticeable part of a step is no imbalance, however uneven it is. The first step, in which everything is made, is
left out where there are others.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

from flowledger.diagnose.measures.load import waiting_share
from flowledger.diagnose.orders.answer import Answer, failed, passed, skipped, warned
from flowledger.diagnose.orders.evidence import Evidence
from flowledger.tables.metrics import metric


def _most(name: str) -> float:
    """The end of what is healthy for a metric."""
    healthy = metric(name).healthy
    assert healthy is not None
    return healthy[1]


UNEVEN = _most("imbalance/<stage>/tokens")  # the most of a rank over the mean of all
NOTICED = _most("bubble")  # of ranks' time that they wait, before anything is blamed
LOST_S = 1.0  # seconds that a rank loses in a step, before that is worth a word: what is shorter is noise of the host
OFTEN = 0.5  # of the steps in which it must be so
STEPS = 3  # in which a rank has to be the slow one, each time
STRAGGLES = 1.25  # seconds a token over the median of the ranks
FILL = 0.6  # tokens of the mean micro-batch over the largest
MOST = 8

LOAD = "SELECT * FROM balance_at(NULL) WHERE source <> 'plan' AND rank IS NOT NULL"
WAITS = """
SELECT step, stage, "group", peer_ranks, comm_type, last_rank, sum(seconds) AS seconds, count(DISTINCT rank) AS ranks FROM waited
WHERE source <> 'plan' GROUP BY ALL ORDER BY seconds DESC
"""
CUTS = """
SELECT step, stage, rank, coalesce(epoch, 0) AS epoch, coalesce(mini_batch, 0) AS mini_batch, micro_batch, max(tokens_computed) AS tokens, max(tokens_valid) AS valid FROM spans_view
WHERE source <> 'plan' AND micro_batch IS NOT NULL AND stage IN ('update_actor', 'update_critic') AND tokens_computed > 0 GROUP BY ALL
"""

Rows = Sequence[Mapping[str, Any]]


def tokens(evidence: Evidence) -> Answer:
    """Tokens, Σlen² and the longest sample of each rank; only where the others wait for the rank that has most."""
    if len(evidence.ranks) < 2:
        return _alone(evidence)
    found = []
    for stage, steps in _by_stage(evidence).items():
        uneven = [rows for rows in steps if _ratio(rows, "tokens") >= UNEVEN and _is_waited_for(rows, "tokens")]
        if len(uneven) >= max(1, OFTEN * len(steps)):
            found.append((stage, max(uneven, key=lambda rows: _ratio(rows, "tokens")), len(uneven), len(steps)))
    table = [line for steps in _by_stage(evidence).values() for line in _lines(steps[-1])]
    if not table:
        return skipped()
    if not found:
        return passed(f"tokens of {len(evidence.ranks)} ranks are even, or nobody waits for them", *table[:MOST])
    stage, rows, often, of = max(found, key=lambda one: _ratio(one[1], "tokens"))
    top = max(rows, key=lambda row: row["tokens"])
    average = mean(row["tokens"] for row in rows)
    why = (
        f", {top['longest']:,} of them in one sample"
        if top["longest"] and top["longest"] > top["tokens"] - average
        else ""
    )
    return failed(
        f"rank {top['rank']} has {top['tokens']:,} tokens in {stage}, {top['tokens'] / average - 1:.0%} above the mean{why}; the "
        f"others wait for it ({often} of {of} steps)",
        *_lines(rows), stage=stage, step=top["step"], rank=top["rank"], confidence=0.8,
        next_step="one sample is longer than a fair share: cap response lengths, or cut sequences (sp, cp)" if why else
        "deal out samples by length (balance over ranks), not by number",
    )  # fmt: skip


def micro_batches(evidence: Evidence) -> Answer:
    """Numbers of micro-batches, how full they are, and how much of them is padding."""
    rows = evidence.rows(CUTS)
    if not rows:
        return skipped()
    by_step: dict[tuple[int | None, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_step[row["step"], row["stage"]].append(row)
    fills, worst = [], None
    for (step, stage), cut in by_step.items():
        most = max(row["tokens"] for row in cut)
        fill = mean(row["tokens"] for row in cut) / most
        fills.append(fill)
        if worst is None or fill < worst[0]:
            worst = fill, step, stage, most, len(cut)
    assert worst is not None
    fill, step, stage, most, count = worst
    message = f"micro-batches are filled to {mean(fills):.0%} of the largest"
    told = f"step {step}, {stage}: {count} micro-batches, the largest of {most:,} tokens, the mean {fill:.0%} of it"
    if mean(fills) < FILL and len(evidence.ranks) > 1 and _waits_too_long(evidence):
        return warned(
            message, told, stage=stage, step=step,
            next_step="cut micro-batches by tokens (a budget) instead of by samples, and balance them",
        )  # fmt: skip
    return passed(message, told)


def waits(evidence: Evidence) -> Answer:
    """Who waits for whom in the collectives of an axis, as a part of the stage's time."""
    if len(evidence.ranks) < 2:
        return _alone(evidence)
    rows = evidence.rows(WAITS)
    if not evidence.rows("SELECT 1 FROM waits WHERE source <> 'plan' LIMIT 1"):
        return skipped()
    rows_of_ranks = _timed(evidence)
    share, each = waiting_share(rows_of_ranks) or 0.0, _lost(rows_of_ranks)
    shown = [
        f"step {row['step']}, {row['stage']}: {row['ranks']} ranks waited {row['seconds']:.3g} s in {row['comm_type']} over "
        f"{_group(row)} for rank {row['last_rank']}"
        for row in rows[:MOST]
    ]
    axes = _by_axis(rows)
    if share < NOTICED or not axes:
        return passed(f"ranks wait {share:.0%} of their time in stages for a later rank (bubble)", *shown)
    if each < LOST_S:
        return passed(
            f"ranks wait {share:.0%} of their time in stages for a later rank (bubble), {each:.2g} s a step and rank: too little to blame anything for",
            *shown,
        )
    axis, seconds = max(axes.items(), key=lambda one: one[1])
    late: dict[int, float] = defaultdict(float)
    for row in rows:
        late[row["last_rank"]] += row["seconds"]
    last, caused = max(late.items(), key=lambda one: one[1])
    most = "most of it for" if caused > 0.5 * sum(late.values()) else "for none more than"
    return failed(
        f"ranks wait {share:.0%} of their time in stages for a later rank (bubble), {seconds / sum(axes.values()):.0%} of that over {axis}, {most} rank {last}",
        *shown, stage=rows[0]["stage"], rank=last, confidence=0.5,
    )  # fmt: skip


def stragglers(evidence: Evidence) -> Answer:
    """A rank that takes longer for each token than the others do, and queues that do not drain."""
    slow = _slow(evidence)
    queued = evidence.series.get("rollout/waiting", {})
    shown = [f"rollout/waiting: {value:.3g} samples in step {step}" for step, value in list(queued.items())[-3:]]
    if slow is not None:
        stage, rank, factor, often, lines = slow
        return failed(
            f"rank {rank} takes {factor:.2f} times as long a token as the others in {stage} ({often} steps), with no more to do",
            *lines, *shown, stage=stage, rank=rank, confidence=0.75,
            next_step="look at its host: clocks, temperature, another job, its link; move the rank to see whether it goes with it",
        )  # fmt: skip
    if len(evidence.ranks) < 2 and not queued:
        return skipped()
    return passed(
        "no rank takes longer for its tokens than the others"
        if len(evidence.ranks) > 1
        else "one rank; its queue drains",
        *shown,
    )


# -------------------------------------------------------------------------------------------------------------- load


def _alone(evidence: Evidence) -> Answer:
    return passed("one rank: nobody to share with") if evidence.ranks else skipped()


def _by_stage(evidence: Evidence) -> dict[str, list[Rows]]:
    """stage -> for each step the rows of its ranks, where these share samples."""
    found: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in evidence.rows(LOAD):
        if row["tokens"]:
            found[row["stage"], row["step"]].append(row)
    stages: dict[str, list[Rows]] = defaultdict(list)
    for (stage, _), rows in sorted(found.items(), key=lambda one: (one[0][0], one[0][1] or 0)):
        if len(rows) > 1:
            stages[stage].append(rows)
    return {stage: steps[1:] if len(steps) > 1 else steps for stage, steps in stages.items()}


def _ratio(rows: Rows, column: str) -> float:
    values = [row[column] or 0 for row in rows]
    return max(values) / mean(values) if mean(values) else 1.0


def _is_waited_for(rows: Rows, column: str) -> bool:
    """Whether the others lose a noticeable part of the stage, while the rank that has most is busy."""
    top = max(rows, key=lambda row: row[column])
    seconds = max(row["seconds"] or 0 for row in rows)
    waited = [row["waited_seconds"] for row in rows if row is not top and row["waited_seconds"] is not None]
    if waited:
        busiest = min(rows, key=lambda row: row["waited_seconds"] if row["waited_seconds"] is not None else seconds)
        return _is_noticed(mean(waited), seconds) and bool(busiest["rank"] == top["rank"])
    others = [row["seconds"] or 0 for row in rows if row is not top]
    return _is_noticed((top["seconds"] or 0) - max(others, default=0), seconds)


def _is_noticed(lost: float, seconds: float) -> bool:
    """Whether what is lost in a stage of one step is worth a word."""
    return lost >= max(LOST_S, NOTICED * seconds)


def _lines(rows: Rows) -> list[str]:
    return [
        f"step {row['step']}, {row['stage']}, rank {row['rank']}: {row['samples']} samples, {row['tokens']:,} tokens, Σlen² "
        f"{row['length_squares']:,}, longest {row['longest']:,}{_times(row)}"
        for row in sorted(rows, key=lambda row: -row["tokens"])[:MOST]
    ]


def _times(row: Mapping[str, Any]) -> str:
    waited = f", waited {row['waited_seconds']:.3g} s" if row["waited_seconds"] is not None else ""
    return f", {row['seconds']:.3g} s{waited}" if row["seconds"] is not None else waited


def _timed(evidence: Evidence) -> Rows:
    """Stages of ranks whose waits are known, those that `bubble` is made of, without the first step where there are others."""
    rows = [row for row in evidence.rows(LOAD) if row["seconds"] and row["waited_seconds"] is not None]
    return [row for row in rows if row["step"] != 0] or rows


def _lost(rows: Rows) -> float:
    """Seconds that a rank waits in a step, the mean over ranks and steps."""
    steps = len({(row["step"], row["rank"]) for row in rows})
    return sum(row["waited_seconds"] for row in rows) / steps if steps else 0.0


def _waits_too_long(evidence: Evidence) -> bool:
    """Whether ranks wait for one another more than is healthy, and so long that it is no noise of the host."""
    rows = _timed(evidence)
    return (waiting_share(rows) or 0.0) >= NOTICED and _lost(rows) >= LOST_S


def _by_axis(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for row in rows:
        if row["step"] != 0:
            found[_group(row)] += row["seconds"]
    return dict(found)


def _group(row: Mapping[str, Any]) -> str:
    return (
        str(row["group"])
        if row["group"] and not row["group"][0].isdigit()
        else f"ranks {row['group'] or row['peer_ranks']}"
    )


def _slow(evidence: Evidence) -> tuple[str, int, float, int, list[str]] | None:
    """(stage, rank, factor, steps, evidence) of a rank whose own seconds a token are above those of the others, step after step."""
    for stage, steps in _by_stage(evidence).items():
        factors: dict[int, list[float]] = defaultdict(list)
        for rows in steps:
            each = {
                row["rank"]: ((row["seconds"] or 0) - (row["waited_seconds"] or 0)) / row["tokens"] for row in rows
                if row["seconds"] and (row["waited_seconds"] is not None or len(rows) > 2)
            }  # fmt: skip
            for rank, pace in each.items():
                others = [one for other, one in each.items() if other != rank]
                if others and median(others) > 0:
                    factors[rank].append(pace / median(others))
        for rank, found in factors.items():
            slow = [factor for factor in found if factor >= STRAGGLES]
            if len(found) >= STEPS and len(slow) == len(found) and _matters(steps, rank):
                lines = [line for rows in steps[-2:] for line in _lines(rows)]
                return stage, rank, median(found), len(found), lines
    return None


def _matters(steps: Sequence[Rows], rank: int) -> bool:
    """Whether the others wait for this rank a noticeable part of the stage."""
    seconds = sum(max(row["seconds"] or 0 for row in rows) for rows in steps)
    waited = sum(mean([row["waited_seconds"] or 0 for row in rows if row["rank"] != rank] or [0.0]) for rows in steps)
    return bool(seconds) and _is_noticed(waited / len(steps), seconds / len(steps))
