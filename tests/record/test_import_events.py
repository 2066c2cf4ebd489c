"""Event files of TensorBoard and offline files of W&B: real ones beside what their own libraries read, and damaged ones."""

import json
import math
import struct
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.flow.errors import BadInput
from flowledger.record.importers import tensorboard, wandb
from flowledger.record.importers.formats import format_of
from flowledger.record.importers.imported import import_into
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.source import Source
from flowledger.record.importers.wire import Malformed, Window, fields, masked_crc32c, signed

DATA = Path(__file__).parents[1] / "data" / "imports"
EVENTS, OFFLINE, LONG = (
    DATA / name for name in ("events.out.tfevents.sample", "offline.wandb", "offline_long.wandb.gz")
)
EXPECTED = json.loads((DATA / "events_expected.json").read_text())


def read(reader, path):
    notes = Notes()
    return list(reader.read(Source(path), notes)), notes


def number(row):
    return "nan" if math.isnan(row.value) else row.value


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("events") / "file"


# ---------------------------------------------------------------- what the libraries read


def test_tensorboards_scalars_are_those_that_tensorboard_reads():
    rows, notes = read(tensorboard, EVENTS)
    assert sorted((row.raw_name, row.step, number(row), row.t_ns / 1e9) for row in rows) == sorted(
        map(tuple, EXPECTED["tensorboard"])
    )
    assert not notes.skipped
    assert {row.name for row in rows} >= {"reward/mean", "grad_norm", "entropy"}  # the file has verl's names


def test_the_history_is_what_wandb_reads():
    rows, notes = read(wandb, OFFLINE)
    told = {(row.step, row.raw_name): number(row) for row in rows}
    own = ("critic/score/mean", "actor/grad_norm", "actor/entropy", "nested.a")
    calls = EXPECTED["wandb"]["history"]
    assert told == {(call["_step"], name): call[name] for call in calls for name in own}
    assert notes.config == EXPECTED["wandb"]["config"] and not notes.skipped
    assert notes.framework == "verl" and any("grpo" in remark for remark in notes.remarks)


def test_a_record_that_goes_over_several_blocks():
    """The configuration is longer than two blocks of 32 KiB, and the file is packed."""
    rows, notes = read(wandb, LONG)
    wanted = EXPECTED["wandb_long"]
    norms = [row.value for row in rows if row.raw_name == "actor/grad_norm"]
    assert (len(norms), math.fsum(norms)) == (wanted["calls"], pytest.approx(wanted["sum"], rel=1e-12))
    assert rows[-1].step == 199 and len(notes.config["note"]) == wanted["note_length"]
    assert any("exit code 3" in remark for remark in notes.remarks)


def test_they_are_recognised_and_come_to_a_run(tmp_path):
    assert [format_of(Source(path)).name for path in (EVENTS, OFFLINE, LONG)] == ["tensorboard", "wandb", "wandb"]
    summary = import_into([OFFLINE], tmp_path / "run")
    assert (summary.rows["metrics"], summary.first_step, summary.last_step) == (20, 1, 5)


# ---------------------------------------------------------------- forms of scalars

# RFC 3720, B.4: 32 bytes of zeroes, of ones, ascending, descending.
CRCS = {
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
}


@pytest.mark.parametrize(("data", "crc"), CRCS.items())
def test_the_check_is_that_of_the_standard(data, crc):
    assert masked_crc32c(data) == ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32


def varint(value):
    out = b""
    while value > 0x7F:
        out += bytes((value & 0x7F | 0x80,))
        value >>= 7
    return out + bytes((value,))


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value % 2**64)
    return varint(number << 3 | 2) + varint(len(value)) + value


def framed(event):
    length = struct.pack("<Q", len(event))
    return length + struct.pack("<I", masked_crc32c(length)) + event + struct.pack("<I", masked_crc32c(event))


def event(tag, value, step=3):
    return framed(field(2, step) + field(5, field(1, field(1, tag.encode()) + value)))


HEADER = framed(field(3, b"brain.Event:2"))
FLOAT, DOUBLE, INT, LONG_INT, HALF, STRING = 1, 2, 3, 9, 19, 7
TENSORS = {  # tensor.proto: type, then the one element in its own field or in tensor_content
    "float_val": (field(1, FLOAT) + varint(5 << 3 | 5) + struct.pack("<f", 0.5), 0.5),
    "float_val packed": (field(1, FLOAT) + field(5, struct.pack("<f", 0.5)), 0.5),
    "double_val": (field(1, DOUBLE) + varint(6 << 3 | 1) + struct.pack("<d", 0.1), 0.1),
    "int_val": (field(1, INT) + field(7, -2), -2.0),
    "int64_val packed": (field(1, LONG_INT) + field(10, varint(300)), 300.0),
    "half_val": (field(1, HALF) + field(13, varint(0x3E00)), 1.5),
    "content": (field(1, FLOAT) + field(4, struct.pack("<f", 2.5)), 2.5),
    "content of a long": (field(1, LONG_INT) + field(4, struct.pack("<q", -7)), -7.0),
    "two elements": (field(1, FLOAT) + field(4, struct.pack("<ff", 1, 2)), None),
    "text": (field(1, STRING) + field(8, b"lr = 1e-6"), None),
    "nothing": (field(1, FLOAT), None),
}


@pytest.mark.parametrize(("tensor", "value"), TENSORS.values(), ids=TENSORS)
def test_a_scalar_that_is_a_tensor(place, tensor, value):
    place.write_bytes(HEADER + event("x", field(8, tensor)))
    rows, notes = read(tensorboard, place)
    assert [row.value for row in rows] == ([] if value is None else [value])
    assert not notes.skipped


def test_negative_steps_and_huge_ones(place):
    place.write_bytes(HEADER + b"".join(event("x", varint(2 << 3 | 5) + struct.pack("<f", 1), n) for n in (-1, 2**62)))
    assert [row.step for row in read(tensorboard, place)[0]] == [-1, 2**62]


@given(st.lists(st.tuples(st.integers(1, 2**20), st.one_of(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=50)))))
def test_fields_are_read_as_they_were_written(values):
    found = list(fields(b"".join(field(number, value) for number, value in values)))
    assert [(n, v if isinstance(v, bytes) else signed(v)) for n, v in found] == values


@given(st.binary(max_size=60))
def test_any_bytes_are_fields_or_malformed(data):
    with suppress(Malformed):
        assert sum(len(v) for _, v in fields(data) if isinstance(v, bytes)) <= len(data)


@given(st.lists(st.binary(max_size=9)), st.lists(st.integers(0, 20)))
def test_a_window_gives_the_bytes_in_any_sizes(pieces, sizes):
    window, whole = Window(iter(pieces)), b"".join(pieces)
    assert b"".join(window.take(size) for size in sizes) == whole[: sum(sizes)]
    assert window.place == min(sum(sizes), len(whole))


# ---------------------------------------------------------------- damage


def test_a_file_that_is_cut_off_gives_what_was_whole(place):
    whole, data = [number(row) for row in read(tensorboard, EVENTS)[0]], EVENTS.read_bytes()
    for size in range(0, len(data), 149):
        place.write_bytes(data[:size])
        rows, notes = read(tensorboard, place) if size else ([], Notes())
        assert [number(row) for row in rows] == whole[: len(rows)]
        assert set(notes.skipped.items()) <= {("the last record is cut off", 1)}
    assert notes.skipped


def test_of_a_record_whose_check_is_wrong_nothing_is_told(place):
    data = bytearray(EVENTS.read_bytes())
    at = data.index(b"actor/grad_norm") + 17  # in the first of its values
    data[at] ^= 0x10
    place.write_bytes(data)
    rows, notes = read(tensorboard, place)
    whole = read(tensorboard, EVENTS)[0]
    assert notes.skipped == {"a record whose check is wrong": 1}
    assert [number(row) for row in rows] == [number(row) for row in whole[:1] + whole[2:]]


def test_a_length_that_is_damaged_ends_the_reading(place):
    data = bytearray(EVENTS.read_bytes())
    second = 12 + data[0] + 4
    data[second + 2] ^= 1
    place.write_bytes(data)
    rows, notes = read(tensorboard, place)
    assert not rows and next(iter(notes.skipped)).startswith("a record's length is damaged")


def test_a_damaged_record_of_wandb_is_counted_and_the_next_ones_are_read(place):
    data = bytearray(OFFLINE.read_bytes())
    summary = data.index(b"critic/score/mean")
    data[data.index(b"critic/score/mean", summary + 1) + 20] ^= 1  # in the first call of the history
    place.write_bytes(data)
    rows, notes = read(wandb, place)
    assert notes.skipped == {"a record whose check is wrong": 1}
    assert {row.step for row in rows} == {2, 3, 4, 5}


@pytest.mark.parametrize(
    ("reader", "data", "says"),
    [
        (tensorboard, b"", ""),
        (tensorboard, b"no events at all, but long enough", "no event file"),
        (wandb, b"", "no .wandb file"),
        (wandb, b"RIFF1234", "no .wandb file"),
        (wandb, b":W&B\xe1\xbe\x07rest", "version 7"),
        (wandb, b":W&B\xe1\xbe\x00", ""),
    ],
)  # fmt: skip
def test_what_is_none_of_it(place, reader, data, says):
    place.write_bytes(data)
    if says:
        with pytest.raises(BadInput, match=says):
            read(reader, place)
    else:
        assert read(reader, place)[0] == []


def test_damaged_packing_gives_what_came_before(place):
    place.write_bytes(LONG.read_bytes()[:-2000])
    rows, notes = read(wandb, place)
    assert rows and any("gzip" in reason for reason in notes.skipped)


SAMPLES = {tensorboard: EVENTS.read_bytes(), wandb: OFFLINE.read_bytes()}
CHANGES = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(("flip", "drop", "repeat", "zero", "random")), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4)  # fmt: skip


def changed(data, changes):
    """Bytes with some changed, taken out, doubled or put in."""
    out = bytearray(data)
    for where, how, noise in changes:
        at = int(where * len(out))
        if how == "flip":
            out[at : at + 1] = bytes((out[at] ^ noise[0] if at < len(out) else 0,))
        elif how == "drop":
            del out[at : at + noise[0]]
        elif how == "repeat":
            out[at:at] = out[at : at + noise[0]]
        elif how == "zero":
            out[at : at + len(noise)] = bytes(len(noise))
        else:
            out[at : at + len(noise)] = noise
    return bytes(out)


@settings(max_examples=100, deadline=2000)
@given(st.sampled_from(list(SAMPLES)), CHANGES)
def test_whatever_is_changed_there_are_rows_or_a_clear_line(place, reader, changes):
    place.write_bytes(changed(SAMPLES[reader], changes))
    try:
        read(reader, place)
    except BadInput as error:
        assert str(place) in str(error) and "\n" not in str(error)
