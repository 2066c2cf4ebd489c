"""Ranks that wait in different collectives of one group, as NCCL's watchdog told of each in the logs: who is behind."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flowledger.diagnose.orders.answer import Answer, failed
from flowledger.diagnose.orders.evidence import Evidence

WAITS = re.compile(r"rank (?P<rank>\d+) waits in collective (?P<number>\d+) (?P<kind>\w+)(?: of group (?P<group>\d+))?")
MOST = 8
CONFIDENCE = 0.9
NOT_NAMED = 0.8  # the lines do not say in which group: the numbers of two groups would differ without a fault


class Place(NamedTuple):
    """A collective: its number within the group, and what it is."""

    number: int
    kind: str

    def __str__(self) -> str:
        return f"{self.number} {self.kind}"


def apart(evidence: Evidence) -> Answer | None:
    """Ranks of one group in different collectives; None where all that are known wait in the same one."""
    lines = [line for one in evidence.ends for line in one.evidence or ()]
    groups: dict[str, dict[int, Place]] = {}
    for found in filter(None, map(WAITS.fullmatch, lines)):
        group = groups.setdefault(found["group"] or "", {})
        group.setdefault(int(found["rank"]), Place(int(found["number"]), found["kind"]))
    for name, places in groups.items():
        if len(set(places.values())) > 1:
            return _told(name, places)
    return None


def _told(group: str, places: dict[int, Place]) -> Answer:
    counted = Counter(places.values())
    ordered = sorted(counted, key=lambda place: (place.number, counted[place], place.kind))
    first, last = ordered[0], ordered[-1]
    at = {place: sorted(rank for rank, mine in places.items() if mine == place) for place in ordered}
    shown = ", ".join(f"{_ranks(at[place])} {_is(at[place])} at {place}" for place in ordered[:MOST])
    behind = last.number - first.number
    if behind:
        end = f"{_ranks(at[first])} {_is(at[first])} {behind} behind"
        who = "the rank that is behind"
    else:
        end = "with the same number, they have called different ones"
        who = "a rank of each"
    where = f" of group {group}" if group else ""
    return failed(
        f"ranks are in different collectives{where}: {shown}: {end}", *_sentences(at), *_caution(group), rank=at[first][0],
        confidence=CONFIDENCE if group else NOT_NAMED,
        next_step=f"run it again and, while it hangs, `py-spy dump --pid PID` of {who} ({_ranks(at[first])}): it shows what it does "
        "instead; compare the ranks' numbers of micro-batches and of tokens: a rank with fewer, or a branch that only some take, "
        "calls other collectives",
    )  # fmt: skip


def _sentences(at: dict[Place, list[int]]) -> Iterator[str]:
    for place, ranks in list(at.items())[:MOST]:
        yield f"{_ranks(ranks)}: NCCL's watchdog caught collective {place} waiting"


def _caution(group: str) -> Iterator[str]:
    if not group:
        yield "the lines do not name the group of ranks: the numbers are compared as those of one group"


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - MOST} more" if len(ranks) > MOST else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MOST]))}{more}"


def _is(ranks: Sequence[int]) -> str:
    return "are" if len(ranks) > 1 else "is"
