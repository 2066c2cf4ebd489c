"""Who waits for whom: collectives that some ranks have entered and others do not come to.

A rank that is late is no hang. One is stuck that has begun and ended nothing for as long as the limit, and does not itself
wait for ranks that get on.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow

HANG_AFTER_S = 300.0  # where the configuration of the run does not say
MOST = 20  # sentences of evidence
NAMED = 8  # ranks that are named one by one

Row = Mapping[str, Any]


def check(ledger: Ledger, limit_s: float | None = None) -> list[FindingRow]:
    """One finding where ranks hang: the wait nearest to its cause, every other as evidence; none where one is recorded."""
    limit = _limit(ledger) if limit_s is None else limit_s
    if limit <= 0 or ledger.rows("SELECT id FROM findings WHERE id = 'hang' LIMIT 1"):
        return []
    missing = ledger.rows("FROM waiting WHERE NOT is_there")
    still = _stuck(missing, limit)
    hanging = [row for row in missing if row["seconds"] >= limit and row["peer"] in still]
    if not hanging:
        return []
    waiting = {row["rank"] for row in missing}
    meetings = [list(rows) for _, rows in groupby(sorted(hanging, key=_meeting), key=_meeting)]
    meetings.sort(key=lambda rows: (all(row["peer"] in waiting for row in rows), -max(row["seconds"] for row in rows)))
    sentences = [_sentence(rows) for rows in meetings]
    first = meetings[0][0]
    return [
        FindingRow(
            id="hang", verdict="fail", severity="error", step=first["step"], stage=first["stage"], phase=first["phase"],
            mini_batch=first["mini_batch"], micro_batch=first["micro_batch"], message=sentences[0],
            evidence=sentences[:MOST], next_step=_next_step(ledger, first),
        )
    ]  # fmt: skip


def _limit(ledger: Ledger) -> float:
    record = ledger.directory.manifest.config.get("record") or {}
    return float(record.get("hang_after_s", HANG_AFTER_S))


def _stuck(missing: Iterable[Row], limit: float) -> set[int]:
    """Ranks that do not get on: quiet for so long, and if they wait themselves, for one of these."""
    quiet: dict[int, float] = {}
    waits_for: dict[int, set[int]] = {}
    for row in missing:
        quiet |= {row["peer"]: row["peer_quiet_s"], row["rank"]: row["rank_quiet_s"]}
        waits_for.setdefault(row["rank"], set()).add(row["peer"])
    stuck = {rank for rank, seconds in quiet.items() if seconds >= limit}
    while free := {rank for rank in stuck if rank in waits_for and not waits_for[rank] & stuck}:
        stuck -= free
    return stuck


def _meeting(row: Row) -> tuple[Any, ...]:
    return row["parties"], row["nth"], row["comm_type"]


# -------------------------------------------------------------------- words

MANY = {"has": "have", "is": "are", "it": "they", "waits": "wait"}


def _sentence(rows: Sequence[Row]) -> str:
    """`rank 2 has waited 41 s in all_reduce over dp (0, 2) at update_actor/backward; rank 0 is not there: it is in reward, since 43 s`."""
    first, seconds = rows[0], max(row["seconds"] for row in rows)
    ranks = sorted({row["rank"] for row in rows})
    peers = sorted({row["peer"]: row for row in rows}.values(), key=lambda row: (_instead(row), row["peer"]))
    head = f"{_ranks(ranks)} {_of(ranks, 'has')} waited {seconds:.0f} s in {_collective(first)} at {_place(first)}"
    return "; ".join([head, *(_absence(list(alike)) for _, alike in groupby(peers, key=_instead))])


def _absence(alike: Sequence[Row]) -> str:
    ranks, since = [row["peer"] for row in alike], max(row["peer_seconds"] or row["peer_quiet_s"] for row in alike)
    verb, what = _instead(alike[0])
    return f"{_ranks(ranks)} {_of(ranks, 'is')} not there: {_of(ranks, 'it')} {_of(ranks, verb)} {what}, since {since:.0f} s"


def _instead(row: Row) -> tuple[str, str]:
    """Verb and object of what a rank does that is not there."""
    peer = {name.removeprefix("peer_"): value for name, value in row.items() if name.startswith("peer_")}
    if peer["name"] is None:
        return "is", "in nothing that was recorded"
    if peer["group"] is None:
        return "is", f"in {_place(peer)}"
    return "waits", f"in {_collective(peer)} at {_place(peer)}"


def _collective(row: Row) -> str:
    ranks, kind = row["peer_ranks"], row["comm_type"]
    group = (
        "" if row["group"][0].isdigit() else f" over {row['group']}"
    )  # a group without a name is called by its ranks
    if kind in ("send", "recv"):
        return f"{kind} {'to' if kind == 'send' else 'from'} rank {ranks[0]}{group}"
    return f"{kind}{group} ({_listed(ranks)})" if group else f"{kind} of {_ranks(ranks)}"


def _place(row: Row) -> str:
    stage = row["stage"] or row.get("name") or "no stage"
    phase = f"/{row['phase']}" if row["phase"] else ""
    counted = (("micro_batch", "micro-batch"), ("step", "step"))
    return ", ".join([f"{stage}{phase}", *(f"{word} {row[key]}" for key, word in counted if row[key] is not None)])


def _of(ranks: Sequence[int], word: str) -> str:
    return word if len(ranks) == 1 else MANY[word]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}"


def _listed(ranks: Sequence[int]) -> str:
    more = f" … ({len(ranks)} of them)" if len(ranks) > NAMED else ""
    return ", ".join(map(str, ranks[:NAMED])) + more


def _next_step(ledger: Ledger, row: Row) -> str:
    if row["peer_comm_type"] is not None:
        return (
            f"ranks {row['rank']} and {row['peer']} went different ways before: compare their collectives (view meetings); "
            "unequal numbers of micro-batches do this"
        )
    (process,) = ledger.rows("SELECT host, pid FROM processes WHERE process = ?", [row["peer_process"]])
    return (
        f"see what rank {row['peer']} does: py-spy dump --pid {process['pid']} on {process['host']}; "
        "where it is only slow, raise record.hang_after_s"
    )
