"""What would be faster: said only where nothing is wrong, for low utilisation is mostly a symptom."""

from collections.abc import Iterator, Mapping
from typing import Any

from flowledger.diagnose.orders import changes
from flowledger.diagnose.orders.evidence import Evidence
from flowledger.diagnose.orders.peaks import FULLEST, size
from flowledger.ledger.manifest import value_at
from flowledger.ledger.rows import FindingRow

ROOM = 0.6  # of the device: below that a larger micro-batch fits
TARGET = 0.85  # of the device that a larger budget may fill
PADDED = 1.25  # computed tokens over those that count
SHARES = {
    "weight_sync": 0.1,
    "reward": 0.2,
    "checkpoint": 0.2,
    "validate": 0.3,
}  # of a step, from which a stage is worth a word
MOST_ROLLOUT = 0.7

STAGES = """
SELECT stage, avg(share) AS share, sum(tokens_computed)::DOUBLE / nullif(sum(tokens_valid), 0) AS padded, sum(tokens_logical)::DOUBLE / nullif(sum(tokens_valid), 0) AS logical
FROM stages WHERE source <> 'plan' AND (step > 0 OR (SELECT count(DISTINCT step) FROM stages WHERE source <> 'plan') = 1) GROUP BY stage
"""
WORDS = {
    "weight_sync": "the weight sync takes {share:.0%} of a step: larger buckets, fewer synchronisations (several updates each), or a transfer that overlaps",
    "reward": "rewards take {share:.0%} of a step: more workers, or rewards of finished samples while others are still sampled",
    "checkpoint": "checkpoints take {share:.0%} of a step: save more rarely, or in the background",
    "validate": "validation takes {share:.0%} of a step: validate more rarely, or fewer samples",
}  # fmt: skip


def advice(evidence: Evidence) -> Iterator[FindingRow]:
    """Single changes, what would gain most first as far as that can be told."""
    shares = {row["stage"]: row for row in evidence.rows(STAGES)}
    yield from _larger_budget(evidence, shares)
    yield from _padding(evidence, shares)
    yield from _rollout(evidence, shares)
    for stage, least in SHARES.items():
        share = (shares.get(stage) or {}).get("share") or 0
        if share >= least:
            yield _said(
                f"advice.{stage}",
                WORDS[stage].format(share=share),
                [f"{stage}: {share:.1%} of all ranks' time in a step"],
            )


def _larger_budget(evidence: Evidence, shares: Mapping[str, Any]) -> Iterator[FindingRow]:
    """Where memory stays free in the update: more tokens a micro-batch, or no recomputation."""
    there = [row for row in evidence.rows(FULLEST) if row["stage"] == "update_actor" and row["limit"]]
    if not there:
        return
    top = there[0]
    used = top["peak"] / top["limit"]
    if used > ROOM:
        return
    shown = [f"update_actor: peak {size(top['peak'])} of {size(top['limit'])} ({used:.0%})"]
    budget = value_at(evidence.config, "actor.micro_batch.max_tokens")
    samples = value_at(evidence.config, "actor.micro_batch.samples")
    if budget:
        to = int(budget * min(2.0, TARGET / used)) // 128 * 128
        fix = changes.fix("halve_token_budget", evidence.framework, evidence.config, to=to)
        yield _said(
            "advice.token_budget",
            f"memory stays free in the update: a budget of {to:,} tokens makes fewer, larger micro-batches",
            shown,
            fix,
        )
    elif samples:
        to = max(samples + 1, int(samples * min(2.0, TARGET / used)))
        fix = changes.fix("halve_micro_batch", evidence.framework, evidence.config, to=to)
        yield _said(
            "advice.micro_batch",
            f"memory stays free in the update: micro-batches of {to} samples are fewer and larger",
            shown,
            fix,
        )


def _padding(evidence: Evidence, shares: Mapping[str, Any]) -> Iterator[FindingRow]:
    row = shares.get("update_actor") or {}
    padded = row.get("padded")
    if padded and padded >= PADDED:
        yield _said(
            "advice.padding", f"the update computes {padded:.2f} tokens for each that counts: remove padding (pack sequences)",
            [f"update_actor: computed over valid tokens {padded:.2f}"],
        )  # fmt: skip


def _rollout(evidence: Evidence, shares: Mapping[str, Any]) -> Iterator[FindingRow]:
    share = (shares.get("rollout") or {}).get("share") or 0
    if share < MOST_ROLLOUT:
        return
    waiting = list(evidence.series.get("rollout/waiting", {}).values())
    shown = [
        f"rollout: {share:.1%} of all ranks' time in a step",
        *evidence.figures("rollout/running", "rollout/waiting"),
    ]
    if waiting and max(waiting) > 0:
        yield _said(
            "advice.rollout_queue",
            f"the rollout takes {share:.0%} of a step while samples wait for a slot: room for more that run at once",
            shown,
        )
    else:
        yield _said(
            "advice.rollout",
            f"the rollout takes {share:.0%} of a step: its longest responses decide; sample ahead of the update, or cap lengths",
            shown,
        )


def _said(name: str, message: str, evidence: list[str], fix: dict[str, str] | None = None) -> FindingRow:
    return FindingRow(
        id=name,
        order="advice",
        verdict="pass",
        severity="info",
        message=message,
        evidence=evidence,
        fix=fix,
        confidence=0.5,
    )
