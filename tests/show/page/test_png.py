"""Pictures of the page's charts, without a browser."""

import json
from pathlib import Path

import pytest
import vl_convert

from flowledger.cli.page import book, write_png
from flowledger.flow.errors import BadInput
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.show.page import lifetimes, lifetimes_picture, mesh_picture, png, views
from flowledger.show.page.choice import Choice
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
    assert {file.stem for file in made} == {
        "overview-memory",
        "memory-kinds",
        "memory-allocator",
        "lifetimes",
        "mesh-peak",
    }
    for file in made:
        content = file.read_bytes()
        assert content.startswith(SIGNATURE)
        assert int.from_bytes(content[16:20]) > 2 * png.WIDTH  # pixels across: sharp in print


def test_each_view_is_drawn_or_said_not_to_be() -> None:
    assert {view.name for view in views.VIEWS} - {"overview", "memory", "lifetimes", "mesh", "signals"} == set(
        png.NOT_DRAWN
    )


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    create(tmp_path / "run", Manifest(run="run")).close("closed")
    with pytest.raises(BadInput, match="nothing that could be drawn"):
        write_png(tmp_path / "run", tmp_path / "png", plan=None, lang="en")


def test_a_folder_that_cannot_be_written_to_is_said(planned: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot write to"):
        write_png(planned, tmp_path / "file", plan=None, lang="en")


def test_bars_of_lifetimes_are_those_of_the_view(recorded: Path) -> None:
    with Ledger(recorded) as ledger:
        told = lifetimes.data(book(ledger, None), Choice(step=0))
    spec, rows = lifetimes_picture.picture(told)
    drawn = {row["line"].strip("\u200b") for row in rows}
    assert sum(row["part"] == "needed" for row in rows) == len({row["line"] for row in rows}), "one bar a line"
    prompt = next(row for row in told["rows"] if row["tensor_name"] == "prompt_ids" and row["born_at"] == "prompt")
    line = next(row["line"] for row in rows if row["line"].startswith("prompt_ids  "))
    parts = {row["part"]: row for row in rows if row["line"] == line}
    assert (parts["needed"]["from"], parts["needed"]["to"]) == (prompt["born"], prompt["due"] + 1)
    assert parts["read"]["from"] == prompt["reads"][0] + 0.5
    state = next(row for row in rows if row["line"].startswith("optimizer_state"))
    assert state["from"] == 1 + [(one["stage"], one["phase"]) for one in told["columns"]].index(
        ("update_critic", "backward")
    )
    assert any(name.startswith("old_log_prob") for name in drawn)
    assert len(vl_convert.vegalite_to_svg(dressed({**spec, "data": {"values": rows}, "width": 900}))) > 1000


def test_heat_of_ranks_is_theirs_and_of_one_rank_there_is_none() -> None:
    held = {"heat": {"seconds": {"": [3.0, 4.0], "rollout": [1.0, None]}, "peak": {"": [5.0]}}}
    ((what, _, spec, rows),) = mesh_picture.pictures(held)
    assert what == "seconds"
    assert [(row["stage"], row["rank"], row["share"], row["written"]) for row in rows] == [
        ("whole step", 0, 0.75, "3.00 s"), ("whole step", 1, 1.0, "4.00 s"), ("rollout", 0, 1.0, "1.00 s"),
    ]  # fmt: skip
    assert "4.00 s" in vl_convert.vegalite_to_svg(dressed({**spec, "data": {"values": rows}}))
