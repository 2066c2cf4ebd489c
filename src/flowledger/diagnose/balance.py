"""What ranks must have in common: the number of micro-batches. Where it differs, the one with more waits in a collective for ever."""

from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

# Micro-batches of each rank in each mini-batch. A rank that was not seen beyond them may have had more to come (it died, or
# waits there): it tells only where it has more than one that got on. Beyond them a mini-batch sums up over ranks and steps.
# A rank that has none has got on in a later step.
UNEQUAL = """
WITH mine AS (
    SELECT step, stage, coalesce(epoch, 0) AS epoch, coalesce(mini_batch, 0) AS mini_batch, rank, process, id, micro_batch,
        coalesce(phase = 'step' OR (comm_type = 'all_reduce' AND micro_batch IS NULL), false) AS sums_up
    FROM spans_view WHERE source <> 'plan' AND rank IS NOT NULL),
counts AS (
    SELECT step, stage, epoch, mini_batch, rank, process, count(DISTINCT micro_batch) AS n, max(id) AS last
    FROM mine WHERE micro_batch IS NOT NULL AND stage IN ('update_actor', 'update_critic')
    GROUP BY step, stage, epoch, mini_batch, rank, process),
ends AS (  -- the last two places of a process: one of them is not the mini-batch in question
    SELECT process, step, stage, epoch, mini_batch, sums_up, max(id) AS last FROM mine
    GROUP BY process, step, stage, epoch, mini_batch, sums_up
    QUALIFY row_number() OVER (PARTITION BY process ORDER BY max(id) DESC) <= 2),
seen AS (
    SELECT counts.step, counts.stage, counts.epoch, counts.mini_batch, rank, n, bool_or(ends.last > counts.last AND (sums_up
        OR counts.step IS DISTINCT FROM ends.step OR counts.stage IS DISTINCT FROM ends.stage OR counts.epoch <> ends.epoch
        OR counts.mini_batch <> ends.mini_batch)) AS got_on
    FROM counts JOIN ends USING (process) GROUP BY ALL
    UNION ALL
    SELECT step, stage, epoch, mini_batch, rank, 0, true
    FROM (SELECT DISTINCT step, stage, epoch, mini_batch FROM counts)
    JOIN (SELECT DISTINCT stage, rank, process FROM counts) USING (stage)
    JOIN (SELECT process, max(step) AS last_step FROM mine GROUP BY process) USING (process)
    ANTI JOIN counts USING (step, stage, epoch, mini_batch, rank) WHERE last_step > step)
SELECT step, stage, epoch, mini_batch, min(n) FILTER (got_on) AS least, max(n) AS most,
    arg_min(rank, n) FILTER (got_on) AS short, arg_max(rank, n) AS long
FROM seen GROUP BY step, stage, epoch, mini_batch HAVING min(n) FILTER (got_on) < max(n) ORDER BY ALL
"""


def check(ledger: Ledger) -> list[FindingRow]:
    """A finding for each mini-batch in which ranks went through different numbers of micro-batches; none otherwise.

    That a rank died, or was stopped, in the middle of a mini-batch is no difference.
    """
    return [
        FindingRow(
            id="unequal_micro_batches", verdict="fail", severity="error", step=row["step"], stage=row["stage"],
            epoch=row["epoch"], mini_batch=row["mini_batch"],
            message=f"step {row['step']}, {row['stage']}, mini-batch {row['mini_batch']}: rank {row['long']} goes through "
            f"{row['most']} micro-batches and rank {row['short']} through {row['least']}; collectives of a forward or "
            "backward pass need all ranks",
            next_step="cut each rank's samples into as many micro-batches as the rank that needs most; empty ones count",
        )
        for row in ledger.rows(UNEQUAL)
    ]  # fmt: skip
