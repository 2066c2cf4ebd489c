"""Whatever is fed in: one clear line, or a partial result that says what was left out; never an exception, never much memory."""

import gzip
import json
import os
import resource

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.cli.imports import imported
from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger
from flowledger.record.importers import formats, jsons, source
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.source import Source

OURS = (
    "verl_file", "verl_samples", "areal_samples", "nemo_rl_samples", "trl_completions", "trainer_state", "parquet", "jsonl", "json",
    "csv", "log",
)  # fmt: skip
LOG = b"step:1 - a:1\nstep:2 - a:2\n"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.log", b"", "is empty"),
        ("a.log", gzip.compress(b""), "is empty"),
        ("a.bin", bytes(range(256)) * 64, "of no known form"),
        ("config.json", b'{"model_type": "qwen2"}', "of no known form"),
        ("a.log", b"\x28\xb5\x2f\xfd rest", "zstd -d"),
        ("a.parquet", b"PAR1 and no more", "cannot read"),
        ("a.log", b"hello world\n" * 9, "says anything of a training"),
        ("a.jsonl", b'{"prompt": "x"}\n', "says anything of a training"),
    ],
    ids=["empty", "packed and empty", "binary", "a model", "zstd", "torn Parquet", "words", "a prompt"],
)
def test_one_clear_line(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=says) as told:
        imported([tmp_path / name], tmp_path / "run")
    assert str(tmp_path / name) in str(told.value) and "\n" not in str(told.value)
    assert not (tmp_path / "run").exists()


def test_paths_that_are_not_there_hold_nothing_or_may_not_be_read(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "closed.log").write_bytes(LOG)
    (tmp_path / "taken").write_text("x")
    with pytest.raises(BadInput, match="no such file"):
        imported([tmp_path / "nowhere.log"], tmp_path / "run")
    with pytest.raises(BadInput, match="holds no file"):
        imported([tmp_path / "empty"], tmp_path / "run")
    with pytest.raises(BadInput, match="is a file"):
        imported([tmp_path / "closed.log"], tmp_path / "taken")
    with pytest.raises(BadInput, match="no column is a step"):
        imported([tmp_path / "closed.log"], tmp_path / "run", format="csv")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="no regular file"):
        imported([tmp_path / "pipe"], tmp_path / "run")


def test_what_is_readable_of_a_damaged_gzip_is_kept(tmp_path):
    lines = "".join(f"step:{step} - a:{step * 0.37!r} - b:{os.urandom(8).hex()}1\n" for step in range(1, 3000)).encode()
    whole = gzip.compress(lines)
    path = tmp_path / "job.log.gz"
    path.write_bytes(whole[: len(whole) // 2])
    summary = imported([path], tmp_path / "run")
    assert 500 < summary.steps < 2999
    assert any("damaged gzip" in reason for reason in summary.notes.skipped)
    with Ledger(tmp_path / "run") as ledger:
        (found,) = ledger.rows("FROM findings WHERE id = 'import_skipped'")
    assert "damaged gzip" in found["message"]


def test_a_directory_of_mixed_files_gives_what_is_of_use(tmp_path):
    folder = tmp_path / "job"
    (folder / "sub").mkdir(parents=True)
    (folder / "job.log").write_bytes(LOG)
    (folder / "sub" / "weights.safetensors").write_bytes(bytes(2000))
    (folder / "sub" / "nothing.log").write_bytes(b"")
    (folder / "notes.txt").write_text("buy milk\n")
    (folder / "torn.parquet").write_bytes(b"PAR1 torn")
    (folder / "sub" / "loop").symlink_to(folder, target_is_directory=True)
    summary = imported([folder], tmp_path / "run")
    assert str(folder / "job.log") in summary.files["log"] and summary.steps == 2
    assert sorted(summary.notes.passed_over) == ["notes.txt", "sub/nothing.log", "sub/weights.safetensors"]
    assert any("torn.parquet" in reason for reason in summary.notes.skipped)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig", "latin-1"])
def test_other_encodings(tmp_path, encoding):
    (tmp_path / "job.log").write_text("é step:1 - a:1\r\nstep:2 - a:2\r\n", encoding=encoding)
    assert imported([tmp_path / "job.log"], tmp_path / "run").rows == {"metrics": 2}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-8-sig"])
def test_json_in_other_encodings(tmp_path, encoding):
    (tmp_path / "m.jsonl").write_text(
        '{"step": 1, "data": {"a": 1}}\n{"step": 2, "data": {"a": 2}}\n', encoding=encoding
    )
    summary = imported([tmp_path / "m.jsonl"], tmp_path / "run")
    assert summary.rows == {"metrics": 2} and list(summary.files) == ["verl_file"]


def test_a_line_without_an_end_is_left_out_and_the_next_one_read(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "LONGEST_LINE", 1 << 16)
    monkeypatch.setattr(source, "CHUNK", 1 << 14)
    (tmp_path / "job.log").write_bytes(
        b"step:1 - a:1\n" + b"step:7 - a:1 " * 20_000 + b"\n" + b"step:2 - a:2\n" + b"x" * 200_000
    )
    notes = Notes()
    got = [line for _, line in Source(tmp_path / "job.log").lines(notes)]
    assert got == ["step:1 - a:1", "step:2 - a:2"] and list(notes.skipped.values()) == [2]


def test_memory_stays_bounded_whatever_the_size(tmp_path):
    """30 MB of one line, and 24 MB of one string: the process grows by far less than either."""
    (tmp_path / "line.log").write_bytes(b"step:1 - a:1\n" + b" - b:2" * (5 << 20))
    with (tmp_path / "trainer_state.json").open("w") as file:
        entry = json.dumps({"step": 1, **{f"name{n}": n for n in range(2000)}})
        file.write('{"log_history": [' + entry)
        for _ in range(3):
            file.write("," + entry)
        file.write(', {"step": 2, "text": "' + "y" * (24 << 20) + '"}]}')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    summary = imported([tmp_path / "line.log", tmp_path / "trainer_state.json"], tmp_path / "run")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 90
    assert len(summary.notes.skipped) == 2 and summary.rows["metrics"] == 2001


def test_a_list_in_a_document_is_found_whatever_the_pieces(tmp_path, monkeypatch):
    told = [{"step": n, "text": '} ] "quoted" \\' + "é" * n, "inner": {"list": [1, {"a": "]"}]}} for n in range(30)]
    path = tmp_path / "state.json"
    path.write_text(
        json.dumps({"log_history": "no list", "other": {"log_history": [1]}, "log_history_2": [3], "x": [[]]})[:-1]
        + ', "log_history": '
        + json.dumps(told)
        + ', "after": [{"b": 1}]}'
    )
    for size in (1, 7, 64, 1 << 20):
        monkeypatch.setattr(source, "CHUNK", size)
        pieces = jsons.elements(Source(path), Notes(), "log_history")
        assert [json.loads(piece) for piece in pieces] == told


SPICED = st.lists(
    st.one_of(
        st.binary(max_size=60),
        st.sampled_from([
            b"step:1 - a:1", b"step:", b"Traceback (most recent call last):", b'  File "x.py", line 1, in f', b"ValueError: x", b"{'a': [1,",
            b"(WorkerDict pid=1) ", b"\x1b[36m", b"\n", b"\r", b"'epoch': 1}", b"{'loss': 1, 'epoch': 1}", b"Namespace(a=", b"- arguments -\n",
            b"memory allocated (GB): 1, memory reserved (GB): 2", b"100%|#| 1/1 [0", b"CUDA out of memory. Tried to allocate 1 GiB", b"+ python train",
            b'{"step": 1, "data": {"a": 1}}', b'{"step": 1e400, "data": {"a": -1}}', b'{"input": 1, "output": [2], "score": "x", "step": {}}',
            b'{"token_ids": [1, "a"], "token_loss_mask": [1], "advantages": 3, "input_lengths": -1}', b'{"log_history": [', b'{"step": 99999999999999999999}',
            b"_step,a\n", b"1,2\n", b'"1', b"[", b"NaN", b"PAR1", b"\x1f\x8b", b"Global step 3: {'a': 1}", b"\xe2\x94\x82 a \xe2\x94\x82 b", b"= Step 1/2 =",
        ]),
    ),
    max_size=25,
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(parts=SPICED, form=st.sampled_from(OURS), glue=st.sampled_from([b"", b"\n"]))
def test_any_bytes_as_any_format_raise_nothing_but_bad_input(tmp_path_factory, parts, form, glue):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(glue.join(parts))
    try:
        one = formats.named(form)
        rows = list(one.read(Source(path), Notes()))
    except BadInput as error:
        assert str(path) in str(error)
        return
    assert all(row.step is None or 0 <= row.step < 1 << 63 for row in rows)


@settings(max_examples=30, deadline=None)
@given(parts=SPICED)
def test_any_bytes_are_of_some_format_or_refused(tmp_path_factory, parts):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(b"".join(parts))
    try:
        assert formats.format_of(Source(path)) in formats.FORMATS
    except BadInput as error:
        assert str(path) in str(error)
