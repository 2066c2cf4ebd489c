"""Traces of several ranks come back as several ranks, on one clock: whatever files are called, and wherever their times begin."""

import gzip
import json
from pathlib import Path

import pytest

from flowledger.ledger.reader import Ledger
from flowledger.record.importers.file_ranks import rank_in
from flowledger.record.importers.imported import import_into
from flowledger.record.importers.trace_ranks import rank_of_process

DATA = Path(__file__).parents[1] / "data" / "imports"
GLOO = [DATA / f"gloo_rank{rank}.pt.trace.json.gz" for rank in (0, 1)]
WAITS = "SELECT rank, nth, seconds, last_rank FROM waits ORDER BY rank, nth"


def traces() -> list[dict]:
    found = []
    for path in GLOO:
        with gzip.open(path) as file:
            found.append(json.load(file))
    return found


def imported(folder: Path, files: dict[str, dict]) -> Ledger:
    folder.mkdir()
    for name, trace in files.items():
        (folder / name).write_text(json.dumps(trace))
    import_into([folder], folder.with_suffix(".run"))
    return Ledger(folder.with_suffix(".run"))


def remarks(ledger: Ledger) -> str:
    return " ".join(row["message"] for row in ledger.rows("SELECT message FROM findings WHERE id = 'import_remarks'"))


def ranks(ledger: Ledger) -> list[int | None]:
    return [
        row["rank"] for row in ledger.rows("SELECT DISTINCT rank FROM spans WHERE span_kind = 'comm' ORDER BY rank")
    ]


@pytest.fixture(scope="module")
def waits(tmp_path_factory) -> list[dict]:
    with imported(
        tmp_path_factory.mktemp("as_is") / "traces",
        {path.name[:-3]: one for path, one in zip(GLOO, traces(), strict=True)},
    ) as ledger:
        assert not remarks(ledger)
        return ledger.rows(WAITS)


def alike(found: list[dict], wanted: list[dict], seconds: float) -> None:
    """The same meetings, and waits that differ by no more than a collective ends earlier on one rank than on the other."""
    assert [(row["rank"], row["nth"]) for row in found] == [(row["rank"], row["nth"]) for row in wanted]
    assert all(abs(one["seconds"] - other["seconds"]) <= seconds for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank3_trace.json", 3), ("worker_2.json", 2), ("1758000000.1-TP-5.trace.json", 5), ("1758-TP-5-DP-1.trace.json", None), ("host_4711.17.pt.trace.json", None), ("http1.json", None), ("rank123456.json", None),
     ("job-worker-1_101.171234567890.pt.trace.json", None)],
)  # fmt: skip
def test_a_name_tells_a_rank_or_does_not(name: str, rank: int | None) -> None:
    assert rank_in(Path("/runs") / name) == rank


@pytest.mark.parametrize(
    ("text", "rank"),
    [("rank 3", 3), ("python: Rank_12 (GPU)", 12), ("[TP03] 4711", 3), ("frank 3", None), ("GPU 3", None), (7, None)],
)
def test_a_process_tells_a_rank_or_does_not(text: object, rank: int | None) -> None:
    assert rank_of_process(text) == rank


def test_files_that_tell_no_rank_are_numbered_by_their_names_and_that_is_said(tmp_path: Path) -> None:
    first, second = traces()
    del first["distributedInfo"], second["distributedInfo"]
    with imported(
        tmp_path / "t", {"a_10.123456789.pt.trace.json": second, "a_9.123456790.pt.trace.json": first}
    ) as ledger:
        assert ranks(ledger) == [0, 1] and "numbered in the order of their names" in remarks(ledger)
        assert ledger.rows("SELECT count(*) AS n FROM processes WHERE role = 'actor'") == [{"n": 2}]


@pytest.mark.parametrize(
    "names", [("a_9.123456789.pt.trace.json", "a_9.223456789.pt.trace.json"), ("trace_step5.json", "trace_step10.json")]
)
def test_two_traces_of_one_process_are_no_two_ranks(names: tuple[str, str], tmp_path: Path) -> None:
    first, second = traces()
    del first["distributedInfo"], second["distributedInfo"]
    with imported(tmp_path / "t", dict(zip(names, (first, second), strict=True))) as ledger:
        assert ranks(ledger) == [None]


def test_two_processes_that_claim_one_rank_are_named(tmp_path: Path) -> None:
    first, second = traces()
    second["distributedInfo"]["rank"] = 0
    with imported(tmp_path / "t", {"a.json": first, "b.json": second}) as ledger:
        assert "b.json: its rank is 0, as that of a" in remarks(ledger)


def test_a_trace_without_a_rank_among_others_that_have_one_is_named(tmp_path: Path) -> None:
    first, second = traces()
    del second["distributedInfo"]["rank"]
    with imported(tmp_path / "t", {"a.json": first, "b.json": second}) as ledger:
        assert ranks(ledger) == [0, None] and "b.json: it does not tell whose rank it is" in remarks(ledger)


def test_work_that_stands_before_the_names_of_its_ranks_is_told_of_and_kept(tmp_path: Path) -> None:
    first, _ = traces()
    work = [{**event, "pid": 100} for event in first["traceEvents"] if event.get("ph") != "M"]
    names = [
        {"ph": "M", "name": "process_name", "pid": 100 + rank, "args": {"name": f"rank {rank}"}} for rank in (0, 1)
    ]
    with imported(tmp_path / "t", {"m.json": {"traceEvents": [*work, *names]}}) as ledger:
        assert ranks(ledger) == [None] and "stands before the names of the ranks" in remarks(ledger)


@pytest.mark.parametrize("by", ["metadata", "id"])
def test_one_file_with_the_traces_of_two_ranks_is_two_ranks(by: str, tmp_path: Path, waits: list[dict]) -> None:
    first, second = traces()
    both, late = [], (second["baseTimeNanoseconds"] - first["baseTimeNanoseconds"]) / 1000
    for rank, trace in enumerate((first, second)):
        for event in trace["traceEvents"]:
            if event.get("ph") == "M":
                continue
            pid = 100 + rank if by == "metadata" else f"[TP{rank:02d}] {event['pid']}"
            both.append({**event, "pid": pid, "ts": float(event["ts"]) + rank * late})
    if by == "metadata":
        both[:0] = [
            {"ph": "M", "name": "process_name", "pid": 100 + rank, "args": {"name": f"rank {rank}"}} for rank in (0, 1)
        ]
    groups = {"pg_config": first["distributedInfo"]["pg_config"]}
    with imported(
        tmp_path / "t",
        {
            "merged.json": {
                "baseTimeNanoseconds": first["baseTimeNanoseconds"],
                "distributedInfo": groups,
                "traceEvents": both,
            }
        },
    ) as ledger:
        assert ranks(ledger) == [0, 1]
        alike(ledger.rows(WAITS), waits, 1e-5)
        assert ledger.rows("SELECT count(DISTINCT rank) AS n FROM metrics WHERE name = 'comm_time_s'") == [{"n": 2}]


# -------------------------------------------------------------------------------------------------------------- clocks


def test_imported_times_are_the_walls_on_every_process(tmp_path: Path) -> None:
    with imported(tmp_path / "t", dict(zip(("rank0.json", "rank1.json"), traces(), strict=True))) as ledger:
        assert ledger.rows("SELECT DISTINCT apart FROM clocks") == [{"apart": 0}]


@pytest.mark.parametrize("lacks", [(1,), (0, 1)])
def test_a_trace_without_an_origin_is_put_beside_the_others_by_what_they_have_in_common(
    lacks: tuple[int, ...], tmp_path: Path, waits: list[dict]
) -> None:
    files = dict(zip(("rank0.json", "rank1.json"), traces(), strict=True))
    for rank in lacks:
        trace = files[f"rank{rank}.json"]
        del trace["baseTimeNanoseconds"]
        for event in trace["traceEvents"]:
            if "ts" in event:
                event["ts"] = float(event["ts"]) % 1e9 + 5e6 * rank
    with imported(tmp_path / "t", files) as ledger:
        alike(ledger.rows(WAITS), waits, 2e-3)
        assert (
            f"rank{lacks[-1]}.json: its times count from an origin that it does not tell; 4 collectives in common"
            in remarks(ledger)
        )


def test_a_clock_that_the_collectives_contradict_is_set_right(tmp_path: Path, waits: list[dict]) -> None:
    first, second = traces()
    second["baseTimeNanoseconds"] += 90_000_000_000
    with imported(tmp_path / "t", {"rank0.json": first, "rank1.json": second}) as ledger:
        alike(ledger.rows(WAITS), waits, 2e-3)
        assert "off that of another rank" in remarks(ledger)


def test_what_nothing_puts_on_one_clock_is_left_and_told(tmp_path: Path) -> None:
    first, second = traces()
    del second["baseTimeNanoseconds"]
    second["traceEvents"] = [
        {**event, "ts": float(event["ts"]) % 1e9}
        for event in second["traceEvents"]
        if "ts" in event and "gloo" not in event["name"]
    ]
    with imported(tmp_path / "t", {"rank0.json": first, "rank1.json": second}) as ledger:
        assert "cannot be compared with those of other ranks" in remarks(ledger)
        (own,) = ledger.rows("SELECT min(start_ns) AS ns FROM spans WHERE rank = 1")
        assert own["ns"] < 1e15
