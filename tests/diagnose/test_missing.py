"""What a ledger lacks breaks no law: steps that were cut off, what a dead process did not tell, rows that reached no disk."""

import io
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from flowledger.diagnose import laws
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import (
    FindingRow,
    MemoryRow,
    MetricRow,
    Row,
    SampleRow,
    SpanRow,
    StorageRow,
    TensorRow,
    TokenRow,
)
from flowledger.show import report
from tests.diagnose.ranks import book

NAMES = [name for name, _, _ in laws.LAWS]


def walk(step: int, inside: Sequence[Row], *, ended: bool = True) -> list[Row]:
    """One step of a rank, which passes its weights on and then, perhaps, ends."""
    told = {"id": 2 * step + 1, "step": step, "name": "step", "span_kind": "stage", "start_ns": 10 * step}
    synced = SpanRow(
        id=2 * step + 2, step=step, stage="weight_sync", name="weight_sync", span_kind="stage", event="whole",
        start_ns=10 * step + 1, end_ns=10 * step + 2,
    )  # fmt: skip
    end = SpanRow(**told, event="end", end_ns=10 * step + 5)
    return [SpanRow(**told, event="begin"), *inside, synced, *([end] if ended else [])]


def broken(step: int) -> list[Row]:
    """One breach of each of six laws; the storage is held against a process from the second step after on."""
    return [
        TensorRow(
            tensor_name="prompt_ids", stage="rollout", step=step, t_ns=10 * step + 3, dims="[B_prompt, S_prompt]", numel=9,
            logical_shape=[4, 8], local_shape=[2, 8], placement=["dp: Shard(0)"], dtype="int64", bytes=128, access="read",
            storage=step,
        ),
        StorageRow(storage=step, event="born", step=step, t_ns=10 * step + 2),
        SampleRow(sample_id=str(step), step=step, prompt_length=2, response_length=2),
        TokenRow(
            sample_id=str(step), position=3, step=step, attention_mask=1, response_mask=0, loss_mask=1, old_log_prob=-1.0,
            rollout_log_prob=-9.0,
        ),
        MemoryRow(instant="end", kind="total", allocated=10, step=step, stage="rollout"),
        MemoryRow(instant="end", kind="param", allocated=11, step=step, stage="rollout"),
    ]  # fmt: skip


def found(path: Path) -> dict[str, FindingRow]:
    with Ledger(path) as ledger:
        return {one.id: one for one in laws.check(ledger)}


def fine(step: int) -> list[Row]:
    """A step in which every law has something to look at, and nothing is wrong."""
    tensor, born, sample, token, total, param = broken(step)
    tensor.numel, token.response_mask, token.rollout_log_prob, param.allocated = 16, 1, -1.0, 9  # type: ignore[attr-defined]  # rows of their tables
    sample.dropped_reason = "rejected"  # type: ignore[attr-defined]  # a sample
    return [
        tensor,
        born,
        sample,
        token,
        total,
        param,
        StorageRow(storage=step, event="freed", step=step, t_ns=10 * step + 9),
    ]


def test_the_rows_of_these_tests_break_every_law_where_all_ranks_ended_their_steps(tmp_path: Path) -> None:
    ends = walk(1, []) + walk(2, [])
    made = found(book(tmp_path / "run", [walk(0, broken(0)) + ends, walk(0, []) + ends]))
    assert {name: made[name].verdict for name in NAMES} == dict.fromkeys(NAMES, "fail")


def test_no_law_is_held_against_a_step_that_was_cut_off(tmp_path: Path) -> None:
    """Step 1 raised, rank 0 did not come out of step 2, and rank 1 did not come to step 3."""
    raised = FindingRow(id="call_failed", verdict="fail", message="reward raised ValueError", step=1)
    first = [
        *walk(0, fine(0)), *walk(1, [*broken(1), raised]), *walk(2, broken(2), ended=False), *walk(3, broken(3)),
    ]  # fmt: skip
    made = found(book(tmp_path / "run", [first, [*walk(0, []), *walk(1, []), *walk(2, [])]]))
    assert {name: made[name].verdict for name in NAMES} == dict.fromkeys(NAMES, "pass")
    assert all(made[name].message.endswith("not checked: steps 1, 2, 3 were cut off)") for name in NAMES)


def test_where_every_step_was_cut_off_nothing_is_checked(tmp_path: Path) -> None:
    made = found(book(tmp_path / "run", [walk(0, broken(0), ended=False)]))
    assert {one.verdict for one in made.values()} == {"skipped"}
    assert {need for one in made.values() for need in one.needs or ()} == {
        "a step that every rank ended: step 0 was cut off"
    }


def test_a_process_that_died_has_not_told_what_it_freed(tmp_path: Path) -> None:
    """Both read a storage in step 0 and tell of no end; rank 1 dies in step 3."""
    both = [[*walk(0, broken(0)), *walk(1, []), *walk(2, [])] for _ in range(2)]
    told = book(tmp_path / "run", [both[0] + walk(3, []), both[1] + walk(3, [], ended=False)])
    (breach,) = found(told)["lifetimes_close"].evidence or ()
    assert breach.startswith("storage 0 in actor-r0-")


def dropped(*counts: float) -> list[list[Row]]:
    name = "recorder/dropped"
    return [[MetricRow(step=0, name=name, raw_name=name, value=count)] for count in counts]


def test_rows_are_missing_for_the_reason_that_the_ledger_shows(tmp_path: Path) -> None:
    """What ranks tell while they record was the queue; what only the end knows could not be written."""
    full = found(book(tmp_path / "queue", dropped(3.0, 2.0)))
    assert full["rows_dropped"].message == "5 rows were dropped: the queue was full, so tables lack them"
    assert "record.queue_rows" in (full["rows_dropped"].next_step or "")
    disk = found(book(tmp_path / "disk", dropped(0.0, 0.0), dropped=4773))
    assert disk["rows_dropped"].message == "4773 rows could not be written, so tables lack them"
    assert {disk[name].needs[0] for name in NAMES if disk[name].needs} == {  # type: ignore[index]  # asked for before
        "a complete recording: 4773 rows could not be written, so tables lack them"
    }
    assert "rows_dropped" not in found(book(tmp_path / "none", dropped(0.0)))


def test_laws_are_counted_apart_from_other_findings(tmp_path: Path) -> None:
    rows: list[Row] = [FindingRow(id=name, order="laws", verdict="pass", message="") for name in NAMES[1:]]
    rows += [FindingRow(id=NAMES[0], order="laws", verdict="fail", message="")]
    others = [("hang", "fail"), ("rank_died", "fail"), ("call_failed", "warn")]
    rows += [FindingRow(id=one, verdict=verdict, message=one) for one, verdict in others]
    page = Console(file=io.StringIO(), width=200)
    with Ledger(book(tmp_path / "run", [rows])) as ledger:
        report.conclude(ledger, page)
    text = page.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert "laws: 5 hold, 1 broken; other findings: 2 failed, 1 to look at; run crashed" in text


def test_why_the_writer_stopped_is_said_with_its_rank_even_where_a_name_was_all_that_the_disk_took(
    tmp_path: Path,
) -> None:
    run = book(tmp_path / "full", [walk(0, []), walk(0, [])], dropped=7)
    (part,) = run.glob("parts/actor-r1-*")
    (part / "failed-ENOSPC").touch()
    with Ledger(run) as ledger:
        (found,) = [one for one in laws.check(ledger) if one.id == "rows_dropped"]
    assert found.message.startswith("7 rows could not be written: actor-r1-")
    assert "No space left on device" in found.message
