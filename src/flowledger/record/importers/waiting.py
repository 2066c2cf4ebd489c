"""Which collective a rank waits in, as NCCL's watchdog says: its number within a group of ranks, and what it is."""

import re
from typing import NamedTuple

from flowledger.record.importers.speakers import Speaker, rank_of

WORK = re.compile(r"WorkNCCL\(SeqNum=(?P<number>\d{1,18}), OpType=(?P<kind>\w{1,60})")
# `[Rank 2]`; with the group since torch 2.2: `[PG 1 Rank 2]`, `[PG ID 0 PG GUID 0(default_pg) Rank 2]`.
# An ID is counted by each rank for itself, a GUID by all together.
WHO = re.compile(
    r"\[(?:PG (?:ID \d{1,9} PG )?(?:GUID )?(?P<group>\d{1,9})[^\]\s]{0,80} )?Rank (?P<rank>\d{1,18})\] Watchdog caught"
)
MOST = 512  # ranks of one log that are kept


class Waiting(NamedTuple):
    """One rank in one collective; `group` is empty where the line does not name it."""

    rank: int
    group: str
    number: int
    kind: str

    def __str__(self) -> str:
        return f"rank {self.rank} waits in collective {self.number} {self.kind}{f' of group {self.group}' if self.group else ''}"


def waiting(text: str, speaker: Speaker) -> Waiting | None:
    """What a line of the watchdog says; None for any other. The launcher's rank counts before that in the group."""
    work, who = WORK.search(text), WHO.search(text)
    rank = speaker.rank if speaker.rank is not None else rank_of(who["rank"]) if who is not None else None
    if work is None or rank is None:
        return None
    kind = work["kind"].strip("_").removesuffix("_BASE")
    return Waiting(rank, (who["group"] or "") if who is not None else "", int(work["number"]), kind)
