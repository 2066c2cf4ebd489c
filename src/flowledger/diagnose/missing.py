"""What a ledger lacks, so that no law is held against it: rows that reached no disk, and steps that were cut off."""

from flowledger.ledger import failures
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

# Of rows with a step: those of steps that every rank went through to the end.
WHOLE = "(step IS NULL OR step NOT IN (SELECT step FROM cut_steps))"

NAMED = 3  # steps that are named one by one


def rows_dropped(ledger: Ledger) -> FindingRow | None:
    """How many rows are not there, and why; None where none is missing.

    What is counted while recording goes on was dropped by a full queue: after an error of the disk nothing is written any
    more, and only the end knows of it.
    """
    told, failed = _told(ledger), failures.kept(ledger.directory.path)
    lost = max(told, ledger.directory.manifest.recorder.get("dropped", 0))
    if not (lost or failed):
        return None
    how, next_step = (
        (
            "could not be written: " + "; ".join(f"{part}: {why}" for part, why in failed.items()),
            "make room, and run again",
        )
        if failed
        else ("were dropped: the queue was full", "raise record.queue_rows, or record at a lower level")
        if told
        else (
            "could not be written",
            "see what the run said when it ended: a full disk, or a limit on the size of files; where it said nothing "
            "the queue was full: raise record.queue_rows",
        )
    )
    return FindingRow(
        id="rows_dropped", verdict="warn", severity="warning", message=f"{lost or 'some'} rows {how}, so tables lack them",
        next_step=next_step,
    )  # fmt: skip


def _told(ledger: Ledger) -> int:
    """Rows that all processes had dropped when they told so last."""
    (found,) = ledger.rows(
        "SELECT sum(most)::BIGINT AS n FROM (SELECT max(value) AS most FROM metrics WHERE name = 'recorder/dropped' GROUP BY process)"
    )
    return found["n"] or 0


def cut_off(ledger: Ledger) -> str:
    """`step 91 was cut off`: which steps not every rank went through to the end; empty where there is none."""
    steps = [str(row["step"]) for row in ledger.rows("SELECT DISTINCT step FROM cut_steps ORDER BY step")]
    if not steps:
        return ""
    if len(steps) > NAMED:
        return f"steps {steps[0]} to {steps[-1]} were cut off"
    return f"step {steps[0]} was cut off" if len(steps) == 1 else f"steps {', '.join(steps)} were cut off"


def has_whole_step(ledger: Ledger) -> bool:
    """Whether anything is left where steps were cut off; a ledger without steps is taken as it is."""
    (found,) = ledger.rows(
        "SELECT count(*) AS steps, count(*) FILTER (step IN (SELECT step FROM cut_steps)) AS cut FROM "
        "(SELECT DISTINCT step FROM walked)"
    )
    return bool(not found["steps"] or found["cut"] < found["steps"])
