"""How memory follows the cut of the batch: tokens of micro-batches, what grows from one to the next, and sequence cuts."""

from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from flowledger.diagnose.orders import changes
from flowledger.diagnose.orders.answer import Answer, passed, warned
from flowledger.diagnose.orders.evidence import Evidence
from flowledger.flow.dims import parse_shape
from flowledger.flow.stages import stages
from flowledger.ledger.manifest import value_at

GROWS = 4  # micro-batches that must each leave more behind before memory is said to grow
NOTEWORTHY = 0.02  # of the peak, from the first micro-batch to the last
UNEVEN = 1.5  # largest micro-batch over the median


class Cut(NamedTuple):
    """Where RunConfig says how a stage cuts its micro-batches, and the changes that make them smaller."""

    paths: tuple[str, ...]  # the first that is set counts: what a stage leaves open it takes from the next
    changes: tuple[str, ...] = ()  # rows of tables/advice.toml: of a budget of tokens, of a number of samples


ACTOR, LOG_PROB = "actor.micro_batch", "actor.log_prob_micro_batch"
UPDATE = Cut((ACTOR,), ("halve_token_budget", "halve_micro_batch"))
CUTS: Mapping[str, Cut] = {
    "update_actor": UPDATE,
    "old_log_prob": Cut((LOG_PROB, ACTOR), ("halve_log_prob_budget", "halve_log_prob_micro_batch")),
    "ref_log_prob": Cut(("ref.micro_batch", LOG_PROB, ACTOR)),
    "update_critic": Cut(("critic.micro_batch", ACTOR)),
    "values": Cut(("critic.values_micro_batch", "critic.micro_batch", ACTOR)),
}

# What was live when each micro-batch ended, or at its peak, with the tokens that it computed.
MICRO = """
WITH counted AS (
    SELECT process, step, stage, coalesce(epoch, 0) AS epoch, coalesce(mini_batch, 0) AS mini_batch, micro_batch, max(tokens_computed) AS tokens FROM spans_view
    WHERE source <> 'plan' AND micro_batch IS NOT NULL AND tokens_computed IS NOT NULL GROUP BY ALL),
placed AS (
    SELECT memory_readings.* REPLACE (coalesce(epoch, 0) AS epoch, coalesce(mini_batch, 0) AS mini_batch), device = 'cpu' AS on_host
    FROM memory_readings LEFT JOIN (SELECT process, device FROM processes) USING (process)
    WHERE source <> 'plan' AND micro_batch IS NOT NULL AND stage IS NOT NULL)
SELECT process, rank, step, stage, epoch, mini_batch, micro_batch, any_value(tokens) AS tokens,
    max(CASE WHEN on_host THEN known ELSE coalesce(known, peak_since_stage, allocated) END) AS peak,
    min(CASE WHEN on_host THEN known ELSE coalesce(allocated, known) END) FILTER (instant = 'end') AS left_behind
FROM placed LEFT JOIN counted USING (process, step, stage, epoch, mini_batch, micro_batch)
GROUP BY process, rank, step, stage, epoch, mini_batch, micro_batch ORDER BY process, step, stage, epoch, mini_batch, micro_batch
"""
TOKENS = "SELECT DISTINCT stage, tokens_computed AS n FROM spans_view WHERE source <> 'plan' AND micro_batch IS NOT NULL AND tokens_computed > 0"


def short_stage(evidence: Evidence) -> str | None:
    """The stage in which memory ran out, or will by a plan; None where nothing names it."""
    if evidence.end is not None:
        return evidence.end.stage
    failed = (one for one in evidence.findings if one.id.startswith("memory.") and one.verdict == "fail")
    return next((one.stage or ("rollout" if one.id == "memory.engine" else None) for one in failed), None)


def cut_of(evidence: Evidence) -> Cut | None:
    """How the stage that ran out cuts its micro-batches; of one that nobody names the update's, of one without any None."""
    stage = short_stage(evidence)
    return UPDATE if stage is None else CUTS.get(stage)


def limit_of(evidence: Evidence, name: str) -> int | None:
    """`max_tokens` or `samples` of that cut, where the configuration says."""
    cut = cut_of(evidence)
    return _limit(evidence, cut.paths, name) if cut else None


def smaller(evidence: Evidence, cut: Cut | None, *, to: int | None = None) -> dict[str, str] | None:
    """The change that makes the micro-batches of a cut smaller, one with a value first; `to`: the budget that was worked out."""
    wanted = cut.changes[: 1 if to is not None else None] if cut else ()
    tried = (changes.fix(one, evidence.framework, evidence.config, to=to) for one in wanted)
    found = [one for one in tried if one is not None]
    return next((one for one in found if one["to"]), found[0] if found else None)


def token_counts(evidence: Evidence, stage: str | None = None) -> list[int]:
    """Tokens that a micro-batch of a stage (else: of the one that ran out) has on one rank, as recorded or planned, and may have by
    the configuration, whose limits are those of all ranks that share a sequence.

    Where nobody names it those of every stage that cuts micro-batches; an engine's steps are none.
    """
    stage = stage or short_stage(evidence)
    asked = [name for name in CUTS if stage in (None, name)]
    found = {
        row["n"]
        for row in evidence.rows(TOKENS)
        if row["stage"] in asked or (stage is None and not _of_engine(row["stage"]))
    }
    for row in evidence.planned.shapes if evidence.planned else ():
        dims = parse_shape(row.dims or "[]") if row.stage in asked else ()
        found |= {size for dim, size in zip(dims, row.local_shape or (), strict=False) if dim.text in ("T", "T_logit")}
    whole, response = _longest(evidence)
    told: set[int] = set()
    for name in asked:
        budget, samples = (_limit(evidence, CUTS[name].paths, limit) for limit in ("max_tokens", "samples"))
        told |= {budget} if budget else set()
        told |= {samples * whole, samples * response} if samples else set()
    if not found and not told and asked:
        told = {whole}
    cut = prod(evidence.degrees.get(axis, 1) for axis in ("cp", "sp"))
    return sorted({int(count) for count in found if count} | {-(-int(count) // cut) for count in told if count})


def _of_engine(stage: str | None) -> bool:
    known = stages().get(stage or "")
    return known is not None and known.role == "rollout"


def _limit(evidence: Evidence, paths: tuple[str, ...], name: str) -> int | None:
    """A limit of the first cut that is set at all: a pass of its own that counts samples has no budget of another's."""
    cut = next((found for path in paths if (found := value_at(evidence.config, path))), None)
    limit = cut.get(name) if isinstance(cut, Mapping) else None
    return int(limit) if limit else None


def _longest(evidence: Evidence) -> tuple[int, int]:
    """Tokens of the longest sample, and of the longest response; 0 where nothing says."""
    prompt = value_at(evidence.config, "data.max_prompt_tokens") or 0
    response = value_at(evidence.config, "rollout.max_response_tokens") or 0
    return prompt + response, response


def growing(evidence: Evidence) -> Answer | None:
    """Whether each micro-batch of an update leaves more behind than the one before: something is kept for each."""
    series: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for row in evidence.rows(MICRO):
        if row["left_behind"] is not None:
            key = row["process"], row["step"], row["stage"], row["epoch"], row["mini_batch"]
            series.setdefault(key, []).append((row["micro_batch"], row["left_behind"]))
    for (_, step, stage, *_rest), points in series.items():
        sizes = [count for _, count in points[1:]]  # the first one makes the gradients
        steps = [after - before for before, after in pairwise(sizes)]
        if len(steps) >= GROWS - 1 and min(steps) > 0 and sizes[-1] - sizes[0] > NOTEWORTHY * sizes[-1]:
            each = (sizes[-1] - sizes[0]) / len(steps)
            return Answer(
                verdict="fail", stage=stage, step=step, confidence=0.8,
                message=f"every micro-batch of {stage} leaves {each / 2**20:.2f} MiB more behind: something is kept for each, "
                "such as an output with its graph",
                evidence=tuple(f"after micro-batch {at}: {count / 2**20:.2f} MiB" for at, count in points[:10]),
                next_step="detach what is kept of a micro-batch (metrics, outputs); flowledger show RUN lifetimes names holders",
            )  # fmt: skip
    return None


def heaviest(evidence: Evidence) -> Answer | None:
    """The micro-batch with the peak and its tokens, beside what the others have; None where tokens or memory are not known."""
    stage = short_stage(evidence)
    rows = [row for row in evidence.rows(MICRO) if row["tokens"] and row["peak"] and stage in (None, row["stage"])]
    if len({row["tokens"] for row in rows}) < 2:
        return None
    top = max(rows, key=lambda row: row["peak"])
    alike = [row for row in rows if row["stage"] == top["stage"]]
    counts = sorted(row["tokens"] for row in alike)
    median = counts[len(counts) // 2]
    place = f"{top['stage']}, micro-batch {top['micro_batch']} (step {top['step']}, rank {top['rank']})"
    message = f"the peak is in {place} of {top['tokens']:,} tokens; half of the micro-batches have at most {median:,}"
    shown = [
        f"{row['tokens']:,} tokens: {row['peak'] / 2**20:.2f} MiB" for row in sorted(alike, key=lambda row: -row["tokens"])[:5]
    ]  # fmt: skip
    if top["tokens"] < max(counts) or top["tokens"] <= UNEVEN * median:
        return passed(message, *shown)
    return warned(
        f"{message}: the largest decides the peak", *shown, stage=top["stage"], step=top["step"], confidence=0.6,
        fix=smaller(evidence, CUTS.get(top["stage"])),
    )  # fmt: skip
