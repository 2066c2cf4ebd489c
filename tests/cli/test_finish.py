"""Closing a book: one reading of the ledger gives its findings, its compact form and its report."""

import errno
import os
import re
from pathlib import Path

import pytest

from flowledger.cli import finish
from flowledger.flow.errors import BadInput
from flowledger.ledger import writer
from flowledger.ledger.reader import Ledger
from tests.diagnose import ranks
from tests.diagnose.sick import span


def test_a_book_is_read_once_and_what_is_found_stands_in_all_that_it_becomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [span(1, "step", 0.0, 2.0, step=0), span(2, "reward", 0.0, 1.0, step=0, stage="reward")]
    path = ranks.book(tmp_path / "run", [rows], state="closed")
    read: list[Path] = []
    init = Ledger.__init__
    monkeypatch.setattr(
        Ledger, "__init__", lambda self, where, **more: (read.append(Path(where)), init(self, where, **more))[1]
    )
    finish.finish(path, tables=False, died="rank 3 died in reward")
    monkeypatch.undo()

    assert read == [path]
    assert not list(path.glob("parts/*")) and len(list(path.glob("compacted/*"))) == 2
    with Ledger(path) as ledger:
        found = ledger.rows("SELECT id, verdict, message, process FROM findings")
        assert ledger.rows("SELECT count(*) AS n FROM processes") == [{"n": 2}]
    told = {row["id"]: row["message"] for row in found}
    assert told["rank_died"] == "rank 3 died in reward" and "masks_nest" in told
    assert all(row["process"] for row in found)
    page, said = (path / "report.html").read_text(encoding="utf-8"), capsys.readouterr().out
    assert "rank 3 died in reward" in page and "fail: rank 3 died in reward" in said
    assert re.search(r"laws: .*not checked", said)


def test_findings_that_cannot_be_written_are_an_error_and_what_was_recorded_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [span(1, "step", 0.0, 2.0, step=0), span(2, "reward", 0.0, 1.0, step=0, stage="reward")]
    path = ranks.book(tmp_path / "run", [rows], state="closed")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer._Files, "append", full)
    with pytest.raises(BadInput, match=r"cannot be written: No space left on device; .* flowledger diagnose"):
        finish.finish(path, tables=False)
    monkeypatch.undo()
    with Ledger(path) as ledger:
        assert ledger.rows("SELECT count(*) AS n FROM spans") == [{"n": 2}]
