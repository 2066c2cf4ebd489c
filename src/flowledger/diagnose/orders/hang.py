"""Hang: who waits for whom, then numbers of micro-batches, then ranks that are dead or slow, and at last host and I/O."""

from flowledger.diagnose.orders import answer
from flowledger.diagnose.orders.answer import Answer, failed, passed, skipped
from flowledger.diagnose.orders.collectives import apart
from flowledger.diagnose.orders.evidence import GONE, Evidence
from flowledger.diagnose.orders.table import orders

MOST = 8
# Stages in which no collective is due, so that a rank in them is at work on the host.
HOST = ("reward", "prompt", "checkpoint", "validate")

OPEN = """
SELECT rank, stage, name, span_kind, comm_type, step, seconds FROM open_spans
WHERE rank IS NOT NULL QUALIFY row_number() OVER (PARTITION BY rank ORDER BY started_ns DESC, id DESC) = 1 ORDER BY seconds DESC
"""


def who_waits(evidence: Evidence) -> Answer:
    """Collectives that some ranks have entered and others have not; a time-out that only the text of a log tells of."""
    hung = [one for one in evidence.findings if one.id == "hang"]
    if hung:
        return passed(hung[0].message)  # the finding itself stands at this step
    if found := apart(evidence):
        return found
    open_rows = _open(evidence)
    if (
        evidence.end is not None
        and evidence.end.id in ("crash", "call_failed")
        and evidence.end.verdict == "fail"
        and _is_meant(evidence.words)
        and not open_rows
    ):
        return failed(
            f"a collective did not come to its end{_where(evidence)}", *evidence.words.splitlines()[:3], confidence=0.3,
            stage=evidence.end.stage, rank=evidence.end.rank,
            next_step="the text tells only of those that wait: record spans (record.level = steps) to see who is not there",
        )  # fmt: skip
    return passed("no rank waits for another for ever", *open_rows) if evidence.has("spans") else skipped()


def micro_batches(evidence: Evidence) -> Answer:
    """Whether ranks go through equally many; the check of that name has compared them."""
    if unequal := [one for one in evidence.findings if one.id == "unequal_micro_batches"]:
        return answer.told(unequal[0]).but(confidence=0.85, evidence=tuple(one.message for one in unequal[:MOST]))
    seen = evidence.rows(
        "SELECT count(DISTINCT rank) AS n FROM spans_view WHERE source <> 'plan' AND micro_batch IS NOT NULL AND rank IS NOT NULL"
    )
    ranks = sum(row["n"] for row in seen)
    return passed(f"{ranks} rank{'s' * (ranks > 1)} with equally many micro-batches") if ranks else skipped()


def ranks(evidence: Evidence) -> Answer:
    """A rank that has ended, or was not heard of while the others went on."""
    end = evidence.end
    if end is not None and end.id == "rank_died":
        return passed(end.message)  # the finding itself stands at this step
    if gone := _gone(evidence):
        return gone
    quiet = evidence.rows(
        "WITH heard AS (SELECT rank, max(coalesce(ended_ns, started_ns)) AS last_ns, any_value(heard_ns) AS heard_ns FROM clocked GROUP BY rank) "
        "SELECT rank, (max(last_ns) OVER () - last_ns) / 1e9 AS behind_s FROM heard ORDER BY behind_s DESC"
    )
    if len(quiet) < 2:
        return passed("one rank") if quiet else skipped()
    last = quiet[0]
    shown = [f"rank {row['rank']} was heard {row['behind_s']:.1f} s before the others" for row in quiet[:3]]
    if _is_stopped(evidence) and last["behind_s"] > 30:
        return failed(
            f"rank {last['rank']} fell silent {last['behind_s']:.0f} s before the others", *shown, rank=last["rank"]
        )
    return passed(f"all {len(quiet)} ranks were heard to the end", *shown[:1])


def _gone(evidence: Evidence) -> Answer | None:
    """Ranks that others were cut off from, and that have not said so themselves."""
    told = [one for one in evidence.ends if GONE in one.message]
    left = [rank for rank in evidence.ranks if rank not in {one.rank for one in told}]
    if not told or not left:
        return None
    last = [line for line in _open(evidence) if line.startswith(tuple(f"rank {rank} " for rank in left))]
    named = f"rank{'s' * (len(left) > 1)} {', '.join(map(str, left[:MOST]))}"
    return failed(
        f"{named} {'have' if len(left) > 1 else 'has'} ended without a word, and cut off the others", *last,
        *(one.message for one in told[:MOST]), rank=left[0], confidence=0.7,
    )  # fmt: skip


def host(evidence: Evidence) -> Answer:
    """Whether what is open is work of the host: rewards, data, checkpoints."""
    if not evidence.has("spans"):
        return skipped()
    stuck = [row for row in evidence.rows(OPEN) if row["stage"] in HOST and row["comm_type"] is None]
    if stuck and _is_stopped(evidence):
        row = stuck[0]
        return failed(
            f"rank {row['rank']} was in {row['stage']} for {row['seconds']:.0f} s, where the host works", *_open(evidence),
            stage=row["stage"], rank=row["rank"], step=row["step"], confidence=0.5,
        )  # fmt: skip
    return passed("nothing of the host's work is open")


def _open(evidence: Evidence) -> list[str]:
    """Where each rank is, of a run that has not ended by itself."""
    return [
        f"rank {row['rank']} is in {', '.join(filter(None, (row['stage'] or row['name'], row['comm_type'])))} since "
        f"{row['seconds']:.1f} s"
        for row in evidence.rows(OPEN)[:MOST]
    ]


def _is_stopped(evidence: Evidence) -> bool:
    """Whether a run hangs, or was stopped while it did something."""
    hung = any(one.id in ("hang", "rank_died") for one in evidence.findings)
    return hung or (evidence.end is not None and _is_meant(evidence.words))


def _is_meant(text: str) -> bool:
    return orders()["hang"].is_meant(text)


def _where(evidence: Evidence) -> str:
    return f" in {evidence.end.stage}" if evidence.end is not None and evidence.end.stage else ""
