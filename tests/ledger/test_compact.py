from pathlib import Path

import pytest

from flowledger.flow.errors import BadInput
from flowledger.ledger import compact as room
from flowledger.ledger.compact import compact
from flowledger.ledger.directory import open_run
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import ROWS
from tests.ledger.synthetic import synthetic_run


class Killed(BaseException):
    """What a kill looks like from inside: nothing catches it."""


def everything(run: Path) -> dict[str, list[tuple]]:
    with Ledger(run) as ledger:
        return {row.table: sorted(ledger.query(f"FROM {row.table}")[1], key=repr) for row in ROWS}


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int, *, before: bool) -> None:
    """Let the n-th call of a function be the moment of the kill, just before or just after it took effect."""
    original, calls = getattr(owner, name), [0]

    def step(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if calls[0] == call and before:
            raise Killed
        result = original(*args, **kwargs)
        if calls[0] == call:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, step)


def test_compaction_changes_no_row_and_leaves_no_part(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "a")
    before = everything(run)
    assert sum(map(len, before.values())) > 100
    compact(run)
    assert everything(run) == before
    assert list((run / "parts").iterdir()) == [] and len(list((run / "compacted").iterdir())) == 1
    assert {file.stem for file in run.glob("*.parquet")} == {row.table for row in ROWS}
    compact(run)
    assert everything(run) == before


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (Ledger, "copy_table", 1),
        (Ledger, "copy_table", 4),
        (Path, "replace", 1),
        (Path, "replace", 8),
        (Path, "rename", 1),
    ],
)
def test_a_kill_at_any_moment_loses_no_row_and_counts_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int, before: bool
) -> None:
    run = synthetic_run(tmp_path / "a")
    expected = everything(run)
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, call, before=before)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a killed process cleans nothing up
        with pytest.raises(Killed):
            compact(run)
    assert everything(run) == expected
    compact(run)
    assert everything(run) == expected
    assert list((run / "parts").iterdir()) == []


def test_torn_lines_are_still_counted_after_compaction(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "a")
    with next(run.glob("parts/*/metrics-0.jsonl")).open("a") as file:
        file.write('{"seq":')
    compact(run)
    with Ledger(run) as ledger:
        assert ledger.torn == 1


def test_a_run_that_is_being_written_is_not_compacted(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "a", state="open")
    with pytest.raises(BadInput, match="still being written"):
        compact(run)


def test_a_compacted_run_takes_no_more_rows(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "a")
    compact(run)
    with pytest.raises(BadInput, match="takes no more rows"):
        open_run(run).part("actor", 1)


def test_a_full_disk_is_one_clear_line_and_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = synthetic_run(tmp_path / "a")
    before = everything(run)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(room.os, "fsync", full)
        with pytest.raises(BadInput, match=r"cannot compact .*No space left"):
            compact(run)
    assert everything(run) == before
    assert list(run.glob(".*")) == []
