"""`show RUN --html`: what it refuses, what it never destroys, and runs whose numbers are beyond all bounds."""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from flowledger.cli import main
from flowledger.cli.page import write_html
from flowledger.flow.errors import BadInput
from flowledger.ledger import directory, manifest
from flowledger.ledger.rows import MemoryRow, MetricRow, Row, SampleRow, SpanRow
from flowledger.ledger.writer import Writer
from flowledger.show.page.document import not_shown

MOST = 2**63 - 1


def run_of(path: Path, rows: Iterable[Row]) -> Path:
    made = directory.create(path, manifest.Manifest(run="odd", level="tensors"))
    ink = Writer(made.part("actor", 0))
    for at, row in enumerate(
        [SpanRow(id=1, event="whole", name="step", span_kind="host", start_ns=0, end_ns=9, step=0), *rows]
    ):
        row.t_ns = at
        ink.put(row)
    ink.close()
    made.close()
    return path


def views(page: Path) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    told: dict[str, Any] = json.loads(found[1])["views"]
    return told


@pytest.mark.parametrize("name", ["manifest.json", "parts/x.html", "spans.parquet"])
def test_no_file_of_the_run_is_written_over(tmp_path: Path, name: str) -> None:
    run = run_of(tmp_path / "run", [])
    before = (run / "manifest.json").read_bytes()
    with pytest.raises(BadInput, match="a file of the run"):
        write_html(run, run / name, plan=None, lang="en")
    assert (run / "manifest.json").read_bytes() == before


def test_a_page_beside_the_rows_is_welcome(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [])
    assert write_html(run, run / "page.html", plan=None, lang="en") == (run / "page.html").stat().st_size


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_a_device_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot write /dev/full: No space left"):
        write_html(run_of(tmp_path / "run", []), Path("/dev/full"), plan=None, lang="en")
    assert Path("/dev/full").is_char_device()


def test_a_directory_is_no_page_and_a_link_stays_one(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [])
    with pytest.raises(BadInput, match="it is a directory"):
        write_html(run, tmp_path, plan=None, lang="en")
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    write_html(run, tmp_path / "link.html", plan=None, lang="en")
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "page.html").is_file()


@pytest.mark.parametrize(
    "rows",
    [
        [MetricRow(name=f"recorder/{name}", raw_name=name, value=math.inf, step=0) for name in ("rows", "bytes", "ns_per_row")],
        [MetricRow(name="recorder/rows", raw_name="rows", special="nan", step=0)],
        [MemoryRow(instant="end", kind=kind, allocated=MOST, step=0) for kind in ("param", "grad", "total")],
        [SampleRow(sample_id=str(n), prompt_length=2**31 - 1, response_length=2**31 - 1, step=0, stage="rollout") for n in range(4)],
    ],
    ids=["infinite", "not a number", "more bytes than there are", "longer than any text"],
)  # fmt: skip
def test_odd_numbers_cost_a_view_at_most(tmp_path: Path, rows: list[Row]) -> None:
    page = tmp_path / "page.html"
    write_html(run_of(tmp_path / "run", rows), page, plan=None, lang="en")
    told = views(page)
    lost = [
        name for name, view in told.items()
        if "cannot be shown" in json.dumps(view["at"][view["first"]].get("missing", []))
    ]  # fmt: skip
    assert len(told) == 8 and len(lost) <= 1


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("Out of Range Error: Overflow in addition of INT128 (1 + 2)!", "a number in its rows is too large"),
        ("Binder Error: Referenced column \"x\" not found in FROM clause!", "its rows do not fit together"),
        ("Out of Memory Error: failed to allocate data of size 16.0 MiB", "its rows do not fit into the memory"),
        ("the run at /x is newer than this flowledger", "the run at /x is newer than this flowledger"),
    ],
)  # fmt: skip
def test_what_the_database_says_is_put_in_words(why: str, told: str) -> None:
    (sentence,) = not_shown(why)["missing"]
    assert sentence["en"].startswith(f"This cannot be shown: {told}")
    assert sentence["zh"].startswith("无法显示：")
    assert ("Error" in sentence["en"]) is False


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--html", "-"), "--html -: nothing is written to standard output; name one, such as --html report.html"),
        (("--png", "-"), "--png -: nothing is written to standard output"),
        (("--html", "x.html", "--json"), "--json belongs to a table, and --html has all of them"),
        (("--png", "x", "--step", "1"), "--step belongs to a table, and --png has all of them"),
        (("shapes", "--plan", "x"), "--plan stands beside a run on its page: give --html FILE or --png DIR too"),
        (("shapes", "--html", "x.html"), "leave shapes out"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    line: str,
) -> None:
    run_of(tmp_path / "run", [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["flowledger", "show", "run", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
