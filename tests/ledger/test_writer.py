import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from flowledger.ledger.rows import MetricRow, SpanRow, StorageRow, TokenRow
from flowledger.ledger.writer import Writer


def lines(part: Path, table: str) -> list[dict]:
    files = sorted(part.glob(f"{table}-*.jsonl"), key=lambda file: int(file.stem.split("-")[1]))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_rows_come_out_numbered_in_the_order_in_which_they_were_put(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for number in range(1000):
        writer.put(
            StorageRow(storage=number, event="born") if number % 2 else MetricRow(name="a", raw_name="a", value=number)
        )
    writer.close()
    assert [row["seq"] for row in lines(tmp_path, "metrics")] == list(range(0, 1000, 2))
    assert [row["storage"] for row in lines(tmp_path, "storages")] == list(range(1, 1000, 2))
    stats = writer.stats()
    assert (stats.rows, stats.dropped, stats.by_table) == (1000, 0, {"metrics": 500, "storages": 500})
    assert stats.bytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert stats.cpu_ns > 0


def test_rows_that_are_made_late_keep_their_place_and_one_that_cannot_be_made_is_counted(tmp_path: Path) -> None:
    writer, made = Writer(tmp_path, flush_s=60), []

    def row(number: int) -> StorageRow:
        made.append(threading.current_thread().name)
        return StorageRow(storage=1 // number + number, event="born")

    writer.put(StorageRow(storage=0, event="born"))
    for number in (2, 0, 3):
        writer.late(lambda number=number: row(number))
    assert made == []  # by who puts it
    writer.put(StorageRow(storage=4, event="born"))
    writer.close()
    writer.late(lambda: row(5))
    assert [(one["seq"], one["storage"]) for one in lines(tmp_path, "storages")] == [(0, 0), (1, 2), (2, 3), (3, 4)]
    assert (writer.stats().rows, writer.stats().dropped) == (4, 2)
    assert made == ["flowledger-writer"] * 3


def test_a_row_is_on_disk_within_a_second_without_a_close(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.put(StorageRow(storage=1, event="born"))
    deadline = time.monotonic() + 2.0
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert time.monotonic() - deadline + 2.0 < 1.0
    writer.close()


def test_numbers_that_json_cannot_hold_are_named_and_never_written(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for value in (math.nan, math.inf, -math.inf, 1.5):
        writer.put(MetricRow(name="loss", raw_name="loss", value=value))
    writer.put(TokenRow(sample_id="0", position=0, ratio=math.inf, entropy=math.nan))
    writer.close()
    text = "".join(file.read_text() for file in tmp_path.iterdir())
    assert "NaN" not in text and "Infinity" not in text
    found = [(row.get("value"), row.get("special")) for row in lines(tmp_path, "metrics")]
    assert found == [(None, "nan"), (None, "inf"), (None, "-inf"), (1.5, None)]


def test_a_full_queue_drops_and_counts_and_never_blocks(tmp_path: Path) -> None:
    writer = Writer(tmp_path, capacity=10, flush_s=60)
    for number in range(25):
        writer.put(StorageRow(storage=number, event="born"))
    assert writer.stats().dropped == 15
    writer.close()
    assert [row["storage"] for row in lines(tmp_path, "storages")] == list(range(10))
    writer.put(StorageRow(storage=99, event="born"))
    assert writer.stats().dropped == 16


def test_a_row_that_cannot_be_encoded_is_dropped_alone(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.put(TokenRow(sample_id="0", position=0, text="a"))
    writer.put(TokenRow(sample_id="0", position=1, text="\ud800"))  # half of a surrogate pair
    writer.put(TokenRow(sample_id="0", position=object()))  # type: ignore[arg-type]  # what a careless caller may do
    writer.put(TokenRow(sample_id="0", position=3, text="d"))
    writer.close()
    assert [row["position"] for row in lines(tmp_path, "tokens")] == [0, 3]
    assert (writer.stats().rows, writer.stats().dropped, writer.failure) == (2, 2, None)


def test_files_rotate_by_size_and_no_row_is_lost(tmp_path: Path) -> None:
    writer = Writer(tmp_path, rotate_bytes=4096)
    for number in range(3000):
        writer.put(StorageRow(storage=number, event="born"))
    writer.close()
    assert len(list(tmp_path.glob("storages-*.jsonl"))) > 3
    assert [row["storage"] for row in lines(tmp_path, "storages")] == list(range(3000))


def test_putting_a_row_costs_less_than_a_microsecond(tmp_path: Path) -> None:
    writer = Writer(tmp_path, capacity=1_000_000, flush_s=60)
    rows = [SpanRow(id=n, event="whole", name="a", span_kind="stage", start_ns=0) for n in range(20_000)]
    best = math.inf
    for at in range(0, len(rows), 2000):
        start = time.perf_counter_ns()
        for row in rows[at : at + 2000]:
            writer.put(row)
        best = min(best, (time.perf_counter_ns() - start) / 2000)
    writer.close()
    assert best < 1000


def run_host(code: str, part: Path) -> subprocess.CompletedProcess[str]:
    text = "import sys, os, time\nfrom flowledger.ledger.writer import Writer\n"
    text += "from flowledger.ledger.rows import StorageRow\n"
    return subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-W",
            "ignore::DeprecationWarning",
            "-c",
            text + textwrap.dedent(code),
            str(part),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_size_limit_stops_the_writing_and_not_the_host(tmp_path: Path) -> None:
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        writer = Writer(__import__("pathlib").Path(sys.argv[1]), flush_s=0.01)
        for number in range(20_000):
            writer.put(StorageRow(storage=number, event="born"))
        time.sleep(0.3)
        writer.put(StorageRow(storage=-1, event="born"))
        writer.close()
        stats = writer.stats()
        print(writer.failure.errno, stats.rows, stats.dropped)
    """
    done = run_host(code, tmp_path)
    assert done.returncode == 0, done.stderr
    errno, rows, dropped = map(int, done.stdout.split())
    assert errno == 27  # EFBIG
    assert (tmp_path / "failed-EFBIG").read_text() == "File too large"
    assert rows + dropped == 20_001
    whole = (tmp_path / "storages-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["storage"] for line in whole[:-1]] == list(range(len(whole) - 1))
    assert rows <= len(whole)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_a_failure_that_is_kept(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    writer = Writer(tmp_path)
    writer.put(StorageRow(storage=0, event="born"))
    writer.close()
    assert isinstance(writer.failure, PermissionError)
    tmp_path.chmod(0o700)


def test_a_directory_that_vanished_is_a_failure_that_is_kept(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "gone")
    writer.put(StorageRow(storage=0, event="born"))
    writer.close()
    assert isinstance(writer.failure, FileNotFoundError)
    assert writer.stats().dropped == 1


def test_a_killed_host_lacks_at_most_the_last_half_second(tmp_path: Path) -> None:
    code = """
        writer = Writer(__import__("pathlib").Path(sys.argv[1]))
        for number in range(200):
            writer.put(StorageRow(storage=number, event="born", t_ns=time.monotonic_ns()))
            time.sleep(0.005)
        print(time.monotonic_ns(), flush=True)
        os.kill(os.getpid(), 9)
    """
    done = run_host(code, tmp_path)
    assert done.returncode == -signal.SIGKILL
    found = lines(tmp_path, "storages")
    assert [row["storage"] for row in found] == list(range(len(found)))
    assert int(done.stdout) - found[-1]["t_ns"] < 500_000_000


def test_a_host_that_just_ends_loses_nothing(tmp_path: Path) -> None:
    code = """
        writer = Writer(__import__("pathlib").Path(sys.argv[1]), flush_s=60)
        for number in range(100):
            writer.put(StorageRow(storage=number, event="born"))
    """
    assert run_host(code, tmp_path).returncode == 0
    assert len(lines(tmp_path, "storages")) == 100


def test_a_forked_child_writes_nothing_into_its_parents_files(tmp_path: Path) -> None:
    code = """
        writer = Writer(__import__("pathlib").Path(sys.argv[1]), flush_s=0.05)
        writer.put(StorageRow(storage=0, event="born"))
        child = os.fork()
        for number in range(1, 50):
            writer.put(StorageRow(storage=number + (1000 if child == 0 else 0), event="born"))
        time.sleep(0.2)
        writer.close()
        if child == 0:
            os._exit(0 if writer.stats().dropped == 49 else 1)  # not kept in memory either
        assert os.waitpid(child, 0)[1] == 0
    """
    done = run_host(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["storage"] for row in lines(tmp_path, "storages")] == list(range(50))
