"""What ranks must have in common: the number of micro-batches. Where it differs, the one with more waits in a collective for ever."""

from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow


def check(ledger: Ledger) -> list[FindingRow]:
    """A finding for each mini-batch in which ranks went through different numbers of micro-batches; none otherwise."""
    rows = ledger.rows(
        "WITH counts AS (SELECT step, stage, epoch, mini_batch, rank, count(DISTINCT micro_batch) AS n FROM spans_view "
        "WHERE source <> 'plan' AND micro_batch IS NOT NULL AND rank IS NOT NULL AND stage IN ('update_actor', 'update_critic') "
        "GROUP BY step, stage, epoch, mini_batch, rank) "
        "SELECT step, stage, epoch, mini_batch, min(n) AS least, max(n) AS most, arg_min(rank, n) AS short, "
        "arg_max(rank, n) AS long FROM counts GROUP BY step, stage, epoch, mini_batch HAVING min(n) <> max(n) ORDER BY ALL"
    )
    return [
        FindingRow(
            id="unequal_micro_batches", verdict="fail", severity="error", step=row["step"], stage=row["stage"],
            epoch=row["epoch"], mini_batch=row["mini_batch"],
            message=f"step {row['step']}, {row['stage']}, mini-batch {row['mini_batch']}: rank {row['long']} goes through "
            f"{row['most']} micro-batches and rank {row['short']} through {row['least']}; collectives of a forward or "
            "backward pass need all ranks",
            next_step="cut each rank's samples into as many micro-batches as the rank that needs most; empty ones count",
        )
        for row in rows
    ]  # fmt: skip
