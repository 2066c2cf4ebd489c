"""Imbalance and hang: tokens, cuts, waits and stragglers of several ranks, each at its own step of the order."""

from pathlib import Path

import pytest

from flowledger.diagnose.measures.series import series_of
from flowledger.diagnose.orders.walk import Diagnosis
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow, Row, SampleRow, SpanRow, Trained
from tests.diagnose import sick
from tests.diagnose.sick import S, cause, first, span, verdict

STEPS = 4


def update(rank: int, lengths: list[int], busy: list[float], world: int) -> list[Row]:
    """Steps of an update: each rank works for its time, then meets the others in an all-reduce that ends when the last is there."""
    rows: list[Row] = []
    for step in range(STEPS):
        start, mine, all_there = 100.0 * step, busy[rank], max(busy) + 0.01
        at = {"step": step, "stage": "update_actor"}
        number = 10 * step + 1
        rows += [
            span(number, "update_actor", start, start + all_there, step=step, stage="update_actor"),
            SpanRow(id=number + 1, parent=number, event="whole", name="all_reduce", span_kind="comm", comm_type="all_reduce", group="dp",
                    peer_ranks=list(range(world)), start_ns=int((start + mine) * S), end_ns=int((start + all_there) * S),
                    t_ns=int((start + all_there) * S), **at),
        ]  # fmt: skip
        for index, length in enumerate(lengths):
            name = f"{step}-{rank}-{index}"
            trained = [Trained(epoch=0, mini_batch=0, rank=rank, micro_batch=0)]
            rows.append(SampleRow(sample_id=name, prompt_length=10, response_length=length - 10, step=step, stage="update_actor",
                                  trained=trained, t_ns=1))  # fmt: skip
    return rows


def job(path: Path, lengths: list[list[int]], busy: list[float]) -> Path:
    return sick.run(path, [update(rank, lengths[rank], busy, len(busy)) for rank in range(len(busy))], level="tensors")


def test_a_rank_with_more_tokens_that_the_others_wait_for_fails_at_the_tokens(tmp_path: Path) -> None:
    lengths = [[100, 100], [100, 100], [100, 900], [100, 100]]
    met = sick.told(job(tmp_path / "run", lengths, [1.0, 1.0, 4.0, 1.0]), order="imbalance")
    assert first(met) == "imbalance.tokens"
    assert "rank 2 has 1,000 tokens in update_actor, 150% above the mean, 900 of them in one sample" in cause(met)
    assert met.cause[1].rank == 2 and "cut sequences" in met.cause[1].next_step


def test_uneven_tokens_that_nobody_waits_for_are_no_imbalance(tmp_path: Path) -> None:
    met = sick.told(job(tmp_path / "run", [[100, 100], [100, 300]], [1.0, 1.02]), order="imbalance")
    assert first(met) is None


def test_a_rank_that_is_slow_with_as_many_tokens_is_a_straggler(tmp_path: Path) -> None:
    met = sick.told(job(tmp_path / "run", [[100, 100]] * 4, [1.0, 3.0, 1.0, 1.0]), order="imbalance")
    assert verdict(met, "imbalance.tokens") == "pass"
    assert first(met) == "imbalance.waits"  # the order looks there first: waits over dp, most of it for rank 1
    assert cause(met).startswith(
        "rank 1 takes 2.98 times as long a token as the others in update_actor"
    )  # (3 - 0) / (3.01 - 2)
    assert met.cause[0].id == "imbalance.stragglers"


def test_even_ranks_pass_every_step(tmp_path: Path) -> None:
    met = sick.told(job(tmp_path / "run", [[100, 120], [110, 110]], [1.0, 1.01]), order="imbalance")
    assert first(met) is None
    assert [answer.verdict for _, answer in met.steps] == ["pass", "skipped", "pass", "pass"]


@pytest.mark.parametrize(
    ("busy", "verdict_", "more"),
    [(0.2, "pass", ", 0.3 s a step and rank: too little"), (20.0, "fail", ", 100% of that over dp")],
)
def test_whether_ranks_are_balanced_is_one_number(busy: float, verdict_: str, more: str, tmp_path: Path) -> None:
    """Rank 0 waits for three quarters of its time, rank 1 for nobody: of the time of both 3/8, short or long."""
    run = job(tmp_path / "run", [[100, 100]] * 2, [busy, 4 * busy])
    with Ledger(run) as ledger:
        bubble = series_of(ledger).by_step("bubble")
        slowest = ledger.rows("SELECT waited_seconds, seconds FROM stages WHERE stage = 'update_actor' AND step = 1")
        balance = ledger.rows("SELECT waited_seconds, seconds FROM balance_at(1) WHERE stage = 'update_actor'")
    assert bubble == pytest.approx(dict.fromkeys(range(STEPS), 3 * busy / (8 * busy + 0.02)))
    assert sum(row["waited_seconds"] for row in balance) / sum(row["seconds"] for row in balance) == pytest.approx(
        bubble[1]
    )
    assert slowest[0] in balance  # of one rank: no second answer to the same question
    (answer,) = [answer for step, answer in sick.told(run, order="imbalance").steps if step.name == "waits"]
    assert answer.verdict == verdict_
    assert answer.message.startswith(
        f"ranks wait {bubble[1]:.0%} of their time in stages for a later rank (bubble){more}"
    )


# ---------------------------------------------------------------------------------------------------------------- hang


def micro(number: int, at: int, start: float, end: float | None) -> SpanRow:
    return span(number, "micro_batch", start, end, span_kind="compute", stage="update_actor", step=0, epoch=0, mini_batch=0,
                micro_batch=at, phase="forward")  # fmt: skip


def wait(number: int, start: float, end: float | None, heard: float) -> SpanRow:
    return SpanRow(id=number, event="begin" if end is None else "whole", name="all_gather", span_kind="comm", comm_type="all_gather",
                   group="dp", peer_ranks=[0, 1], stage="update_actor", step=0, start_ns=int(start * S), t_ns=int(heard * S),
                   end_ns=None if end is None else int(end * S))  # fmt: skip


def test_ranks_that_wait_for_one_with_fewer_micro_batches_are_told_the_reason(tmp_path: Path) -> None:
    rank_0 = [micro(1, 0, 0, 1), wait(2, 0.1, 0.5, 1), micro(3, 1, 1, None), wait(4, 1.1, None, 500)]
    rank_1 = [micro(1, 0, 0, 1), wait(2, 0.1, 0.5, 1), span(3, "reward", 2, None, step=1, stage="reward")]
    rank_1 += [SpanRow(id=4, event="begin", name="step", span_kind="compute", phase="step", stage="update_actor", step=0, epoch=0, mini_batch=0,
                       start_ns=int(1.5 * S), t_ns=int(1.5 * S), end_ns=int(1.6 * S))]  # fmt: skip
    path = sick.run(tmp_path / "run", [rank_0, rank_1], state="interrupted", config={"record": {"hang_after_s": 60}})
    met = sick.told(path)
    assert met.walked[0].order.name == "hang"
    assert first(met) == "hang.who_waits" and "rank 0 has waited" in met.first[1].message
    assert verdict(met, "hang.micro_batches") == "fail"
    assert "rank 0 goes through 2 micro-batches and rank 1 through 1" in cause(met)


def test_a_rank_that_died_is_said_to_have(tmp_path: Path) -> None:
    rows = [
        FindingRow(id="rank_died", verdict="fail", severity="error", message="rank 1 died in reward, step 0: SIGKILL")
    ]
    met = sick.told(sick.run(tmp_path / "run", [rows], state="crashed"))
    assert met.walked[0].order.name == "hang"
    assert first(met) == "hang.ranks" and "SIGKILL" in cause(met)


def test_a_timeout_of_which_only_the_log_tells_says_what_it_lacks(tmp_path: Path) -> None:
    text = "torch.distributed.DistBackendError: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE)"
    rows = [FindingRow(id="crash", verdict="fail", severity="critical", message=text, stage="update_actor")]
    met = sick.told(sick.run(tmp_path / "run", [rows], level="import"))
    assert first(met) == "hang.who_waits" and met.cause[1].confidence < 0.5
    assert "record spans" in met.cause[1].next_step


def hung(path: Path, *evidence: str) -> Diagnosis:
    """A run whose log ends in the watchdog's words, with these places of ranks."""
    text = "NCCL watchdog timeout: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE)"
    return sick.told(
        sick.run(
            path,
            [[FindingRow(id="crash", verdict="fail", severity="critical", message=text, evidence=list(evidence))]],
            level="import",
        )
    )


def test_ranks_in_different_collectives_are_told_with_the_one_that_is_behind(tmp_path: Path) -> None:
    met = hung(
        tmp_path / "run", "rank 5 waits in collective 48213 ALLREDUCE of group 0",
        "rank 2 waits in collective 48211 ALLGATHER of group 0", "rank 3 waits in collective 48213 ALLREDUCE of group 0",
        "rank 1 waits in collective 7 BROADCAST of group 4",
    )  # fmt: skip
    found = met.cause[1]
    assert first(met) == "hang.who_waits" and found.confidence >= 0.9 and found.rank == 2
    assert found.message.endswith("rank 2 is at 48211 ALLGATHER, ranks 3, 5 are at 48213 ALLREDUCE: rank 2 is 2 behind")
    assert "py-spy" in found.next_step and "micro-batches" in found.next_step


def test_different_collectives_of_one_number_are_a_branch_that_only_some_take(tmp_path: Path) -> None:
    found = hung(
        tmp_path / "run", "rank 0 waits in collective 9 ALLREDUCE", "rank 1 waits in collective 9 BROADCAST"
    ).cause[1]
    assert "with the same number, they have called different ones" in found.message and found.confidence < 0.9


def test_ranks_in_one_collective_or_of_different_groups_are_not_compared(tmp_path: Path) -> None:
    met = hung(
        tmp_path / "run", "rank 0 waits in collective 9 ALLREDUCE of group 1",
        "rank 1 waits in collective 7 ALLREDUCE of group 2", "rank 2 waits in collective 9 ALLREDUCE of group 1",
    )  # fmt: skip
    assert "did not come to its end" in met.cause[1].message
