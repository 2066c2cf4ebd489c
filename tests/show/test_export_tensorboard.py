"""Event files: read back by the importer they say the same, and their records are what the format asks for."""

import io
import json
import math
import struct
from collections import defaultdict
from pathlib import Path

import pytest

from flowledger.flow.errors import BadInput
from flowledger.ledger.directory import create
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import MetricRow, TensorRow
from flowledger.ledger.writer import Writer
from flowledger.record.importers.imported import import_into
from flowledger.record.importers.wire import fields, inside
from flowledger.show import export_tensorboard
from flowledger.show.export_rows import Steps
from flowledger.show.export_tensorboard import masked, record, varint
from tests.ledger.synthetic import MS, RESPONSE_LENGTHS, REWARDS, STEP_MS, synthetic_run


def float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def test_the_check_is_that_of_rfc_3720() -> None:
    """crc32c("123456789") = e3069283, and 32 bytes of zero have 8a9136aa (B.4); masked as TFRecord does."""
    for content, crc in ((b"123456789", 0xE306_9283), (bytes(32), 0x8A91_36AA)):
        assert masked(content) == (((crc >> 15) | (crc << 17)) + 0xA282_EAD8) & 0xFFFF_FFFF


def test_a_record_and_a_number_by_hand() -> None:
    file = io.BytesIO()
    record(file, b"abc")
    content = file.getvalue()
    assert content[:8] == b"\3" + bytes(7) and content[12:15] == b"abc" and len(content) == 19
    assert varint(300) == b"\xac\x02" and varint(-1) == b"\xff" * 9 + b"\x01"


def test_the_importer_reads_back_both_names_every_step_and_its_time(tmp_path: Path) -> None:
    book = create(tmp_path / "run", Manifest(run="run", framework="verl"))
    ink = Writer(book.part("driver", None, source="import"))
    wall = 1_700_000_000_000_000_000
    values = {3: 0.1, 4: float("nan"), 5: float("-inf"), 6: 1e39}
    for step, value in values.items():
        ink.put(
            MetricRow(
                step=step, name="entropy", raw_name="actor/entropy", value=value, t_ns=wall + step * 1_500_000_000
            )
        )
    ink.put(MetricRow(name="comm_overlap", raw_name="comm_overlap", value=0.5))
    ink.close()
    book.close()
    with Ledger(book.path) as ledger:
        said = export_tensorboard.write(ledger, tmp_path / "tb", Steps(), {"made": {3: 7.0}})
    assert said == ["1 metrics of run belong to no step: TensorBoard has no place for them"]
    import_into([tmp_path / "tb"], tmp_path / "back")
    with Ledger(tmp_path / "back") as back:
        rows = back.rows(
            "SELECT raw_name, step, coalesce(special::DOUBLE, value) AS value, t_ns FROM metrics ORDER BY raw_name, step"
        )
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        found[row["raw_name"]][row["step"]] = row["value"]
        assert row["t_ns"] == wall + row["step"] * 1_500_000_000
    assert found.keys() == {"entropy", "actor/entropy", "made"} and found["made"] == {3: 7.0}
    for name in ("entropy", "actor/entropy"):
        assert found[name][3] == float32(0.1) and math.isnan(found[name][4])
        assert found[name][5] == -math.inf and found[name][6] == math.inf  # what float32 cannot hold


def test_every_number_of_a_recorded_run_comes_back(tmp_path: Path) -> None:
    asked = (
        "SELECT raw_name, step, coalesce(special::DOUBLE, value) AS value FROM metrics_by_step ORDER BY raw_name, step"
    )
    with Ledger(synthetic_run(tmp_path / "a")) as ledger:
        there = [(row["raw_name"], row["step"], float32(row["value"])) for row in ledger.rows(asked)]
        assert export_tensorboard.write(ledger, tmp_path / "tb", Steps(), {}) == []
        export_tensorboard.write(ledger, tmp_path / "tb", Steps(1, 1), {})  # an export of ours, written anew
        assert len(list((tmp_path / "tb").glob("*tfevents*"))) == 1
        export_tensorboard.write(ledger, tmp_path / "tb", Steps(), {})
        (clock,) = ledger.rows("SELECT apart FROM clocks")
    import_into([tmp_path / "tb"], tmp_path / "back")
    with Ledger(tmp_path / "back") as back:
        again = [(row["raw_name"], row["step"], row["value"]) for row in back.rows(asked)]
        times = {row["step"]: row["t"] for row in back.rows("SELECT step, max(t_ns) AS t FROM metrics GROUP BY step")}
    assert str(again) == str(there) and len(there) == 6  # as text, for nan is not equal to itself
    for step in (0, 1):  # told at the end of the step; a double has microseconds of now
        assert abs(times[step] - (clock["apart"] + (step + 1) * STEP_MS * MS)) < 1000


def test_samples_are_histograms(tmp_path: Path) -> None:
    with Ledger(synthetic_run(tmp_path / "a")) as ledger:
        export_tensorboard.write(ledger, tmp_path / "tb", Steps(1, 1), {})
    (file,) = (tmp_path / "tb").glob("*tfevents*")
    found, content = {}, file.read_bytes()
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        for number, summary in fields(content[12 : 12 + size]):
            for _, value in inside(summary) if number == 5 else ():
                told = dict(inside(value))
                if 5 in told:
                    found[bytes(told[1]).decode()] = dict(inside(told[5]))  # type: ignore[arg-type]
        content = content[16 + size :]
    assert found.keys() == {f"samples/{name}" for name in ("prompt_length", "response_length", "reward", "advantage")}
    for name, values in (("reward", REWARDS), ("response_length", RESPONSE_LENGTHS)):
        one = found[f"samples/{name}"]
        low, high, count, total, squares = (struct.unpack("<d", one[field])[0] for field in (1, 2, 3, 4, 5))  # type: ignore[arg-type]
        assert (low, high, count, total) == (min(values), max(values), 4, sum(values))
        assert squares == sum(value * value for value in values)
        limits, counts = (struct.unpack(f"<{len(one[field]) // 8}d", one[field]) for field in (6, 7))  # type: ignore[arg-type]
        assert sum(counts) == 4 and limits[-1] == high and list(limits) == sorted(limits)
        assert counts[-1] == sum(value == high for value in values)


def test_a_run_without_times_has_that_at_which_it_was_made(tmp_path: Path) -> None:
    book = create(tmp_path / "log", Manifest(run="log", created="2026-01-02T03:04:05+00:00"))
    ink = Writer(book.part("driver", None, source="import"))
    ink.put(MetricRow(step=1, name="loss", raw_name="loss", value=1.0))
    ink.close()
    with Ledger(book.path) as ledger:
        (said,) = export_tensorboard.write(ledger, tmp_path / "tb", Steps(), {})
    assert "1 steps of log have no times" in said
    (file,) = (tmp_path / "tb").glob("*tfevents*")
    assert file.name == "events.out.tfevents.1767323045.flowledger"


def test_a_run_without_numbers_has_nothing_to_draw(tmp_path: Path) -> None:
    book = create(tmp_path / "plan", Manifest(run="plan"))
    ink = Writer(book.part("actor", 0))
    ink.put(TensorRow(tensor_name="logits", step=0))
    ink.close()
    with Ledger(book.path) as ledger, pytest.raises(BadInput, match="no numbers of steps"):
        export_tensorboard.write(ledger, tmp_path / "tb", Steps(), {})
    assert not (tmp_path / "tb").exists()


def test_a_run_that_was_made_at_no_time_is_written_all_the_same(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "a")
    told = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**told, "created": "not a date"}))
    with Ledger(run) as ledger:
        export_tensorboard.write(ledger, tmp_path / "tb", Steps(), {})
    (file,) = (tmp_path / "tb").glob("events.out.tfevents.*")
    assert file.stat().st_size > 1_000
