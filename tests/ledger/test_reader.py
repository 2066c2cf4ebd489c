import json
import time
from pathlib import Path

import duckdb
import pytest

from flowledger.flow.errors import BadInput
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import PART_COLUMNS, ROWS, MetricRow, SampleRow, TensorRow, Trained, columns
from flowledger.ledger.writer import Writer
from tests.ledger.synthetic import REWARDS, synthetic_run


@pytest.fixture
def part(tmp_path: Path) -> Path:
    return create(tmp_path / "a", Manifest(run="a")).part("actor", 3)


def written(part: Path, *rows: object) -> Ledger:
    writer = Writer(part)
    for row in rows:
        writer.put(row)  # type: ignore[arg-type]
    writer.close()
    return Ledger(part.parent.parent)


def test_a_run_without_rows_has_every_table_with_every_column(tmp_path: Path) -> None:
    create(tmp_path / "a", Manifest(run="a"))
    ledger = Ledger(tmp_path / "a")
    for row in ROWS:
        names, values = ledger.query(f"FROM {row.table}")
        assert names == [*PART_COLUMNS, *columns(row)] and values == []


def test_a_row_comes_back_as_it_was_put_defaults_included(part: Path) -> None:
    trained = [Trained(epoch=0, mini_batch=1, rank=0, micro_batch=2, stop=5)]
    ledger = written(
        part,
        SampleRow(sample_id="7", rewards={"task": 0.5, "other": None}, trained=trained, versions=[1, 2]),
        TensorRow(tensor_name="logits", logical_shape=[2, 3], access="write", storage=2**62, shape_checksum=2**32 - 1),
        MetricRow(name="kl", raw_name="k", value=0.0, rank=9),
    )
    (sample,) = ledger.rows("FROM samples")
    assert sample["rewards"] == {"task": 0.5, "other": None} and sample["versions"] == [1, 2] and sample["attempt"] == 0
    assert sample["trained"][0] == {
        "epoch": 0,
        "mini_batch": 1,
        "rank": 0,
        "micro_batch": 2,
        "cp_slice": 0,
        "start": 0,
        "stop": 5,
    }
    (tensor,) = ledger.rows("FROM tensors")
    assert tensor["logical_shape"] == [2, 3] and tensor["storage"] == 2**62 and tensor["process"] == part.name
    assert (tensor["run"], tensor["source"], tensor["rank"]) == ("a", "record", 3)  # the part's own rank
    (metric,) = ledger.rows("FROM metrics")
    assert metric["recomputed"] is False and metric["value"] == 0.0 and metric["rank"] == 9


@pytest.mark.parametrize(
    "torn", [b'{"seq":2,"name":"a","raw', b"\x00\x00\x00\n", b'{"seq":2,"name":"caf\xc3', b"[1, 2]\n", b"}{\n"]
)
def test_torn_lines_are_left_out_and_counted(part: Path, torn: bytes) -> None:
    with written(part, *(MetricRow(name=str(n), raw_name="a", value=1.0) for n in range(3))) as ledger:
        assert ledger.torn == 0
    with (part / "metrics-0.jsonl").open("ab") as file:
        file.write(torn)
    ledger = Ledger(part.parent.parent)
    assert ledger.torn == 1
    assert [row["name"] for row in ledger.rows("FROM metrics ORDER BY seq")] == ["0", "1", "2"]


def test_cutting_a_file_at_any_byte_loses_only_the_line_that_was_cut(part: Path) -> None:
    written(part, *(MetricRow(name=str(n), raw_name="é", value=1.0) for n in range(4))).close()
    file = part / "metrics-0.jsonl"
    whole = file.read_bytes()
    for length in range(len(whole) - 60, len(whole), 7):
        file.write_bytes(whole[:length])
        ledger = Ledger(part.parent.parent)
        left = whole[:length].split(b"\n")
        complete = [json.loads(line)["name"] for line in left if line.endswith(b"}")]
        assert [row["name"] for row in ledger.rows("FROM metrics ORDER BY seq")] == complete
        ledger.close()


@pytest.mark.parametrize(
    "sql",
    ["DROP TABLE tensors", "INSERT INTO metrics BY NAME SELECT 1 AS seq", "COPY tensors TO '/tmp/x'", "ATTACH '/tmp/x.db'",
     "SET enable_external_access = true", "SELECT 1; SELECT 2", "", "PRAGMA version"],
)  # fmt: skip
def test_a_query_only_reads(part: Path, sql: str) -> None:
    with pytest.raises(BadInput, match="give one SELECT statement"):
        written(part).query(sql)


def test_a_query_reaches_no_file(part: Path) -> None:
    with pytest.raises(BadInput, match="disabled by configuration"):
        written(part).query("FROM read_text('/etc/hostname')")


def test_bad_sql_is_one_line_of_the_databases_own(part: Path) -> None:
    with pytest.raises(BadInput, match="Table with name tensor does not exist") as caught:
        written(part).query("SELECT * FROM tensor")
    assert "\n" not in str(caught.value)
    with pytest.raises(BadInput, match="syntax error"):
        written(part).query("SELEC 1")


def test_select_explain_describe_and_parameters_work(part: Path) -> None:
    ledger = written(part, MetricRow(name="a", raw_name="a", value=2.0))
    assert ledger.query("SELECT value FROM metrics WHERE name = ?", ["a"]) == (["value"], [(2.0,)])
    assert ledger.query("DESCRIBE metrics")[1] and ledger.query("EXPLAIN FROM metrics")[1]


def test_a_plan_is_read_beside_the_recording_and_marked(part: Path) -> None:
    plan = part.parent.parent / "plan"
    plan.mkdir()
    duckdb.sql(
        "SELECT 'a' AS run, 'plan' AS source, 'p' AS process, 0 AS seq, 'logits' AS tensor_name, [4, 5] AS logical_shape"
    ).write_parquet(str(plan / "tensors.parquet"))
    ledger = written(part, TensorRow(tensor_name="logits", logical_shape=[4, 6]))
    assert ledger.rows("SELECT source, logical_shape FROM tensors ORDER BY source") == [
        {"source": "plan", "logical_shape": [4, 5]},
        {"source": "record", "logical_shape": [4, 6]},
    ]


def test_a_crashed_run_is_read_as_it_is(tmp_path: Path) -> None:
    with Ledger(synthetic_run(tmp_path / "a", state="open")) as ledger:
        assert [row["reward"] for row in ledger.rows("FROM samples_merged WHERE step = 0")] == list(REWARDS)


def test_two_hundred_thousand_rows_are_read_in_less_than_two_seconds(part: Path) -> None:
    rows = [
        TensorRow(step=n // 100, stage="update_actor", phase="forward", tensor_name="logits", dims="T_logit, V",
                  logical_shape=[n % 50, 10], local_shape=[n % 50, 10], dtype="float32", numel=5, bytes=20, storage=n)
        for n in range(200_000)
    ]  # fmt: skip
    writer = Writer(part, capacity=1_000_000)
    for row in rows:
        writer.put(row)
    writer.close()
    start = time.process_time()
    with Ledger(part.parent.parent) as ledger:
        assert ledger.rows("SELECT count(*) AS n FROM tensors") == [{"n": 200_000}]
    assert time.process_time() - start < 2.0
