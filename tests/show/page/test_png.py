"""Pictures of the page's charts, without a browser."""

import json
from pathlib import Path

import pytest

from flowledger.cli.page import book, write_png
from flowledger.flow.errors import BadInput
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.show.page import png, views
from flowledger.show.page.theme import dressed

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def test_a_run_gives_its_charts(recorded: Path, planned: Path) -> None:
    with Ledger(recorded) as ledger, Ledger(planned) as beside:  # of another job, which is no matter here
        drawn = dict(png.pictures(book(ledger, beside)))
    assert drawn.keys() >= {
        "overview-time", "overview-memory", "memory-kinds", "memory-allocator", "memory-stages", "signals-metrics", "signals-timeline",
        "signals-distributions",
    }  # fmt: skip
    for spec in drawn.values():
        parts = spec.get("concat", [spec])
        assert all(part["data"]["values"] for part in parts)
        for lang in ("en", "zh"):
            made = json.dumps(dressed(spec, lang, dark=True))
            assert "var(--" not in made
            assert '"zh"' not in made


def test_a_plan_gives_what_it_has(planned: Path, tmp_path: Path) -> None:
    made = write_png(planned, tmp_path / "png", plan=None, lang="zh")
    assert {file.stem for file in made} == {"overview-memory", "memory-kinds", "memory-allocator"}
    for file in made:
        content = file.read_bytes()
        assert content.startswith(SIGNATURE)
        assert int.from_bytes(content[16:20]) > 2 * png.WIDTH  # pixels across: sharp in print


def test_each_view_is_drawn_or_said_not_to_be() -> None:
    assert {view.name for view in views.VIEWS} - {"overview", "memory", "signals"} == set(png.NOT_DRAWN)


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    create(tmp_path / "run", Manifest(run="run")).close("closed")
    with pytest.raises(BadInput, match="nothing that could be drawn"):
        write_png(tmp_path / "run", tmp_path / "png", plan=None, lang="en")


def test_a_folder_that_cannot_be_written_to_is_said(planned: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot write to"):
        write_png(planned, tmp_path / "file", plan=None, lang="en")
