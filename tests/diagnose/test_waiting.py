"""Who waits for whom, from ledgers of several processes: written by hand, and from random programs run by a scheduler of its own."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowledger.diagnose import waiting
from flowledger.ledger.directory import Process, create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow, Row, SpanRow
from flowledger.ledger.writer import Writer

S = 1_000_000_000
WALL = 1_700_000_000 * S
names = (f"run-{number}" for number in count())


def ledger(folder: Path, ranks: Sequence[Sequence[Row]], limit_s: float = 10.0) -> Ledger:
    """A run with one process for each rank; rank r's clock began r * 1000 s before that of rank 0."""
    config = {"record": {"hang_after_s": limit_s}}
    book = create(folder / next(names), Manifest(run="hung", level="steps", config=config))
    for rank, rows in enumerate(ranks):
        part = book.part("actor", rank)
        process = Process(
            role="actor", rank=rank, host="node", pid=100 + rank, monotonic_ns=rank * 1000 * S, wall_ns=WALL
        )
        (part / "process.json").write_bytes(msgspec.json.encode(process))
        writer = Writer(part)
        for row in rows:
            for name in ("start_ns", "end_ns", "t_ns"):
                if getattr(row, name, None) is not None:
                    setattr(row, name, getattr(row, name) + rank * 1000 * S)
            writer.put(row)
        writer.close()
    return Ledger(book.path)


def stage(span: int, name: str, start: float, end: float | None = None, **at: Any) -> SpanRow:
    """A stage that began at a second, and ended at one, or not."""
    return SpanRow(
        id=span, event="begin" if end is None else "whole", name=name, span_kind="stage", stage=name, start_ns=int(start * S),
        end_ns=None if end is None else int(end * S), t_ns=int((start if end is None else end) * S), **at,
    )  # fmt: skip


def comm(span: int, kind: str, peers: Sequence[int], start: float, end: float | None = None, **at: Any) -> SpanRow:
    """A collective; one that is open is said to be so until `heard`."""
    heard = at.pop("heard", start)
    return SpanRow(
        id=span, event="begin" if end is None else "whole", name=kind, span_kind="comm", comm_type=kind, peer_ranks=list(peers),
        start_ns=int(start * S), end_ns=None if end is None else int(end * S), t_ns=int((heard if end is None else end) * S),
        **{"group": "dp", "stage": "update_actor", "step": 4, **at},
    )  # fmt: skip


def test_the_sentence_says_who_waits_where_and_where_the_other_is(tmp_path: Path) -> None:
    waits = comm(2, "all_reduce", [0, 2], 9, heard=50, phase="backward", micro_batch=3)
    ranks = [[stage(1, "reward", 7, step=4)], [], [stage(1, "update_actor", 8, step=4), waits]]
    with ledger(tmp_path, ranks) as opened:
        (row,) = opened.rows("FROM waiting")
        (finding,) = waiting.check(opened)
    assert (row["rank"], row["peer"], row["is_there"], row["seconds"]) == (2, 0, False, 41.0)
    assert finding.message == (
        "rank 2 has waited 41 s in all_reduce over dp (0, 2) at update_actor/backward, micro-batch 3, step 4; "
        "rank 0 is not there: it is in reward, step 4, since 43 s"
    )
    assert (finding.id, finding.verdict, finding.stage, finding.micro_batch) == ("hang", "fail", "update_actor", 3)
    assert finding.next_step and "py-spy dump --pid 100 on node" in finding.next_step


def test_ranks_in_different_collectives_wait_for_each_other(tmp_path: Path) -> None:
    ranks = [
        [comm(1, "all_reduce", [0, 1], 0, 1), comm(2, "all_gather", [0, 1], 5, heard=30, phase="forward", micro_batch=1)],
        [comm(1, "all_reduce", [0, 1], 0, 1), comm(2, "all_reduce", [0, 1], 6, heard=31, phase="step")],
    ]  # fmt: skip
    with ledger(tmp_path, ranks) as opened:
        (finding,) = waiting.check(opened)
    assert finding.message == (
        "rank 0 has waited 26 s in all_gather over dp (0, 1) at update_actor/forward, micro-batch 1, step 4; "
        "rank 1 is not there: it waits in all_reduce over dp (0, 1) at update_actor/step, step 4, since 25 s"
    )
    assert finding.evidence and len(finding.evidence) == 2
    assert finding.next_step and "unequal numbers of micro-batches" in finding.next_step


def test_the_wait_that_others_follow_from_comes_first(tmp_path: Path) -> None:
    """Rank 3 waits for 2, since before; 2 and 1 for 0, which sleeps."""
    late = [comm(1, "all_reduce", [0, 1, 2], 9, heard=60, group="0-2") for _ in (1, 2)]
    ranks = [[stage(1, "reward", 8)], [late[0]], [late[1]], [comm(1, "recv", [2], 2, heard=60, group="pp")]]
    with ledger(tmp_path, ranks) as opened:
        (finding,) = waiting.check(opened)
    assert finding.evidence == [
        "ranks 1, 2 have waited 51 s in all_reduce of ranks 0, 1, 2 at update_actor, step 4; "
        "rank 0 is not there: it is in reward, since 52 s",
        "rank 3 has waited 58 s in recv from rank 2 over pp at update_actor, step 4; "
        "rank 2 is not there: it waits in all_reduce of ranks 0, 1, 2 at update_actor, step 4, since 51 s",
    ]


def test_a_message_meets_its_like_in_order_and_one_that_has_arrived_is_waited_for_by_nobody(tmp_path: Path) -> None:
    """Rank 0 has sent two messages and nobody asked whether they left; rank 1 took both and asks for a third."""
    sent = [comm(n, "send", [1], n, heard=90, group="pp") for n in (1, 2)]
    taken = [comm(n, "recv", [0], n, n + 0.5, group="pp") for n in (1, 2)]
    with ledger(tmp_path, [sent, [*taken, comm(3, "recv", [0], 5, heard=90, group="pp")]]) as opened:
        rows = opened.rows("SELECT rank, id, peer, is_there FROM waiting ORDER BY ALL")
        (finding,) = waiting.check(opened)
    assert [tuple(row.values()) for row in rows] == [(0, 1, 1, True), (0, 2, 1, True), (1, 3, 0, False)]
    assert finding.message.startswith("rank 1 has waited 85 s in recv from rank 0 over pp")


@pytest.mark.parametrize(
    "others",
    [
        [stage(1, "rollout", 0), stage(2, "decode", 48, 49)],  # slow, and getting on
        [stage(1, "reward", 0), comm(2, "all_reduce", [0, 1], 9, heard=50)],  # it is there
        [],  # recorded nothing: nobody knows
    ],
)
def test_a_rank_that_gets_on_or_is_there_or_unknown_makes_no_hang(tmp_path: Path, others: list[Row]) -> None:
    with ledger(tmp_path, [others, [comm(1, "all_reduce", [0, 1], 9, heard=50)]]) as opened:
        assert waiting.check(opened) == []


def test_who_waits_for_one_that_waits_for_a_slow_one_does_not_hang(tmp_path: Path) -> None:
    slow = [stage(1, "rollout", 0), stage(2, "decode", 48, 49)]
    ranks = [slow, [comm(1, "all_reduce", [0, 1], 9, heard=50)], [comm(1, "recv", [1], 5, heard=50)]]
    with ledger(tmp_path, ranks) as opened:
        assert len(opened.rows("FROM waiting WHERE NOT is_there")) == 2
        assert waiting.check(opened) == []


def test_below_the_limit_or_without_one_or_once_told_there_is_no_finding(tmp_path: Path) -> None:
    def ranks() -> list[list[Row]]:
        return [[stage(1, "reward", 8)], [comm(1, "all_reduce", [0, 1], 9, heard=50)]]

    told = FindingRow(id="hang", verdict="fail", message="while it hung")
    for limit, more, findings in ((42, [], 0), (41, [], 1), (0, [], 0), (1, [told], 0)):
        with ledger(tmp_path, [*ranks(), more], limit_s=limit) as opened:
            assert len(waiting.check(opened)) == findings, limit


# -------------------------------------------------------------------- random programs

Program = list[list[tuple[int, ...]]]


@st.composite
def programs(draw: st.DrawFn, first: int) -> Program:
    """For each of up to four ranks the groups it goes through in order; of one order of all, some entries are lost."""
    ranks = range(first, first + draw(st.integers(2, 4)))
    groups = st.sets(st.sampled_from(ranks), min_size=2).map(lambda found: tuple(sorted(found)))
    order = draw(st.lists(groups, min_size=1, max_size=6))
    return [[group for group in order if rank in group and draw(st.integers(0, 5))] for rank in ranks]


def run(program: Program, first: int) -> tuple[list[list[Row]], set[tuple[int, int]]]:
    """Step through all ranks at once: the spans they leave, and (who waits, for whom) where nothing goes on."""
    at = [0] * len(program)
    while True:
        heads = [todo[n] if n < len(todo) else None for todo, n in zip(program, at, strict=True)]
        free = {head for head in heads if head is not None and all(heads[one - first] == head for one in head)}
        if not free:
            break
        at = [n + (head in free) for n, head in zip(at, heads, strict=True)]
    rows: list[list[Row]] = [[stage(1000, "update_actor", 0)] for _ in program]
    for rank, todo in enumerate(program):
        for n, group in enumerate(todo[: at[rank] + 1]):
            ended = {"end": n + 1.5} if n < at[rank] else {"heard": 100}
            rows[rank].append(comm(n + 1, "all_reduce", group, n + 1, **ended))
    waits = {
        (first + rank, one) for rank, head in enumerate(heads) if head for one in head if heads[one - first] != head
    }
    return rows, waits


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_view_finds_exactly_who_is_missing_in_any_program(tmp_path: Path, data: st.DataObject) -> None:
    rows: list[list[Row]] = []
    waits: set[tuple[int, int]] = set()
    for _ in range(8):  # apart from each other in one ledger, for to open one takes a while
        spans, missing = run(data.draw(programs(len(rows))), len(rows))
        rows, waits = rows + spans, waits | missing
    with ledger(tmp_path, rows) as opened:
        found = {(row["rank"], row["peer"]) for row in opened.rows("FROM waiting WHERE NOT is_there")}
        findings = waiting.check(opened)
    assert found == waits
    assert len(findings) == bool(waits)


def test_the_scheduler_of_this_test_ends_and_hangs() -> None:
    assert run([[(0, 1)], [(0, 1)]], 0)[1] == set()
    assert run([[(3, 4)], []], 3)[1] == {(3, 4)}
