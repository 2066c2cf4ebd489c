"""Ranks with different numbers of micro-batches are found; one that only came to its end in the middle of them is not."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from flowledger.diagnose import balance
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import Row, SpanRow
from tests.diagnose.ranks import book

Where = tuple[int, str, int, int | None, str | None]  # step, stage, mini-batch, micro-batch, phase


def went(*places: Where) -> list[Row]:
    """The spans of a rank in the order in which they began."""
    return [
        SpanRow(
            id=number, t_ns=number, start_ns=number, end_ns=number + 1, event="whole", name=phase or "micro_batch",
            span_kind="compute", comm_type=None if phase or micro_batch else "all_reduce", step=step, stage=stage, epoch=0, mini_batch=mini_batch, micro_batch=micro_batch, phase=phase,
        )
        for number, (step, stage, mini_batch, micro_batch, phase) in enumerate(places, 1)
    ]  # fmt: skip


def micro(count: int, *, mini_batch: int = 0, step: int = 0, stage: str = "update_actor") -> list[Where]:
    return [(step, stage, mini_batch, number, phase) for number in range(count) for phase in ("forward", "backward")]


SUM: list[Where] = [(0, "update_actor", 0, None, None)]  # an all-reduce over the mini-batch
STEP: list[Where] = [(0, "update_actor", 0, None, "step")]
NEXT = micro(1, mini_batch=1)
LATER: list[Where] = [(1, "rollout", 0, None, None)]

UNEQUAL = {
    "both end the mini-batch": ([micro(2) + STEP, micro(1) + STEP], [(0, "update_actor", 0, 0, 2, 1, 1)]),
    "the longer one hangs in its second": ([micro(2), micro(1) + STEP], [(0, "update_actor", 0, 0, 2, 1, 1)]),
    "the shorter one sums up": ([micro(2), micro(1) + SUM], [(0, "update_actor", 0, 0, 2, 1, 1)]),
    "the shorter one is a mini-batch further": ([micro(3), micro(2) + NEXT], [(0, "update_actor", 0, 0, 3, 1, 2)]),
    "one has none at all": (
        [micro(1) + STEP + NEXT + LATER, micro(1) + STEP + LATER], [(0, "update_actor", 1, 0, 1, 1, 0)],
    ),
    "the critic's": (
        [micro(2, stage="update_critic") + micro(1), micro(1, stage="update_critic") + micro(1)],
        [(0, "update_critic", 0, 0, 2, 1, 1)],
    ),
}  # fmt: skip

EQUAL = {
    "as many": [micro(2) + STEP, micro(2) + STEP],
    "the other died in its first, and this one went on": [micro(1), micro(2) + STEP],
    "the other died before its first": [micro(2) + STEP + NEXT, micro(2) + STEP],
    "it summed up before its first, where it died": [SUM + micro(1), SUM + micro(2) + SUM],
    "both died": [micro(1), micro(2)[:1]],
}


def asked(path: Path, ranks: Sequence[Sequence[Where]]) -> list[tuple[object, ...]]:
    book(path, [went(*places) for places in ranks])
    with Ledger(path, only=("spans",)) as ledger:
        rows = ledger.rows(balance.UNEQUAL)
        assert len(balance.check(ledger)) == len(rows)
    names = ("step", "stage", "mini_batch", "long", "most", "short", "least")
    return [tuple(row[name] for name in names) for row in rows]


@pytest.mark.parametrize("name", list(UNEQUAL))
def test_a_rank_that_goes_through_more_than_one_that_got_on_is_found(tmp_path: Path, name: str) -> None:
    ranks, found = UNEQUAL[name]
    assert asked(tmp_path / "run", ranks) == found


@pytest.mark.parametrize("name", list(EQUAL))
def test_a_rank_that_came_to_its_end_is_no_difference(tmp_path: Path, name: str) -> None:
    assert asked(tmp_path / "run", EQUAL[name]) == []
