"""The verb `export` as a user types it: which options mean something, where it writes, and one clear line where it cannot."""

import gzip
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from flowledger.cli import export
from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger
from flowledger.show import export_perfetto
from tests.cli.conftest import Call
from tests.ledger.synthetic import STAGE_MS, synthetic_run

FORMS = ("perfetto", "parquet", "csv", "prometheus", "prometheus-rules", "tensorboard", "otlp")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_run(tmp_path_factory.mktemp("export") / "a")


@pytest.fixture(autouse=True)
def nothing_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics that are made of other rows take a second a run; one test has them."""
    monkeypatch.setattr(export, "recomputed", lambda ledger: {})


def test_a_trace_is_a_compressed_file_where_its_name_says_so(call: Call, run: Path, tmp_path: Path) -> None:
    code, out, err = call("export", run, "--to", "perfetto", "-o", tmp_path / "t.json.gz", "--step", "1")
    assert (code, err) == (0, "") and "ui.perfetto.dev" in out
    told = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    stages = [one["name"] for one in told["traceEvents"] if one["ph"] == "X" and one["tid"] == 1000]
    assert stages == ["ProfilerStep#1", *STAGE_MS]


@pytest.mark.parametrize("form", ["perfetto", "prometheus", "parquet"])
def test_folders_that_are_missing_are_made_for_every_form(call: Call, run: Path, tmp_path: Path, form: str) -> None:
    code, _, _ = call("export", run, "--to", form, "-o", tmp_path / "new" / "inner" / "made.json")
    assert code == 0 and (tmp_path / "new" / "inner" / "made.json").exists()


def test_metrics_that_no_row_has_are_there_too(
    call: Call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with Ledger(run) as ledger:
        made = export.recomputed(ledger)
        assert made["step_time_s"] == {0: 0.1, 1: 0.1} and "grad_norm" not in made


def test_forms_that_are_directories_need_one(call: Call, run: Path, tmp_path: Path) -> None:
    for form in ("parquet", "csv", "tensorboard"):
        code, out, err = call("export", run, "--to", form)
        assert (code, out) == (2, "") and "-o DIR" in err and len(err.splitlines()) == 1
    code, out, err = call("export", run, "--to", "tensorboard", "-o", tmp_path / "tb")
    assert code == 0 and "tensorboard --logdir" in out and list((tmp_path / "tb").glob("events.out.tfevents.*"))
    code, _, err = call("export", run, "--to", "csv", "-o", run)
    assert code == 2 and "not empty" in err and (run / "manifest.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--to", "perfeto"), "did you mean perfetto?"),
        (("--to", "rules"), "did you mean prometheus-rules?"),
        (("--to", "alarms"), "did you mean prometheus-rules?"),
        (("--to", "Chrome"), "did you mean perfetto?"),
        (("--to", "otlp", "-o", "x"), "OTLP is sent, not written: leave -o out"),
        (("--to", "parquet", "-o", "x", "--step", "1"), "--step means nothing to --to parquet"),
        (("--to", "prometheus", "--step", "0..1"), "name one step"),
        (("--to", "perfetto", "--step", "x"), "give one step (7) or a range"),
        (("--to", "perfetto", "--sample", "nobody"), "has no sample 'nobody'"),
        (("--to", "perfetto", "-o", "/proc/nowhere.json"), "cannot write /proc/nowhere.json"),
    ],
)
def test_what_cannot_be_is_one_clear_line(call: Call, run: Path, words: tuple[str, ...], said: str) -> None:
    code, out, err = call("export", run, *words)
    assert (code, out) == (2, "") and said in err and len(err.splitlines()) == 1


def test_every_form_is_named_where_one_is_unknown_and_a_log_is_no_run(call: Call, run: Path, tmp_path: Path) -> None:
    err = call("export", run, "--to", "excel")[2]
    assert all(f"{form} (" in err for form in FORMS)
    (tmp_path / "log.txt").write_text("step: 1 loss: 0.5")
    code, _, err = call("export", tmp_path / "log.txt", "--to", "csv", "-o", tmp_path / "x")
    assert code == 2 and "flowledger import" in err


@pytest.mark.parametrize("form", ["perfetto", "parquet", "tensorboard"])
def test_a_full_disk_is_told_and_leaves_no_half_file(call: Call, run: Path, tmp_path: Path, form: str) -> None:
    """A limit on the size of files stands for the disk: it breaks a write off in the same way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
        code, out, err = call("export", run, "--to", form, "-o", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (code, out) == (2, "") and "cannot write" in err and len(err.splitlines()) == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "export.json"] == []


@pytest.mark.parametrize("form", [form for form in FORMS if form != "otlp"])
@pytest.mark.parametrize("name", ["manifest.json", "parts/mine", "spans.parquet"])
def test_a_run_is_never_written_over(call: Call, run: Path, form: str, name: str) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, out, err = call("export", run, "--to", form, "-o", run / name)
    assert (code, out) == (
        2,
        "",
    ) and err == f"flowledger: {run / name} is a file of the run; choose another place\n"
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_name_from_a_run_is_no_command_to_a_terminal(call: Call, tmp_path: Path) -> None:
    name = "a\x1b]0;x\x07\nflowledger: all is well\u202e"
    run = synthetic_run(tmp_path / "a")
    told = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**told, "run": name}))
    for words in (("--to", "parquet", "-o", tmp_path / "x"), ("--to", "perfetto", "--sample", "nobody")):
        _, out, err = call("export", run, *words)
        assert "a�]0;x�⏎flowledger: all is well�" in err
        assert len(err.splitlines()) == 1 and all(char.isprintable() or char == "\n" for char in out + err)


@pytest.mark.parametrize("form", ["perfetto", "prometheus"])
def test_who_reads_the_beginning_alone_gets_no_failure(run: Path, form: str) -> None:
    command = [sys.executable, "-m", "flowledger", "export", str(run), "--to", form]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # as `head` does, only sooner
        said = process.stderr.read()
    assert process.returncode == 0 and b"rror" not in said


def test_metrics_that_cannot_be_recomputed_are_left_out(
    call: Call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Ledger) -> None:
        raise BadInput("Out of Range Error: Overflow in addition of INT64 (4611686018427387904 + 4611686018427387904)!")

    monkeypatch.setattr(export, "recomputed", fails)
    code, _, err = call("export", run, "--to", "tensorboard", "-o", tmp_path / "tb")
    assert code == 0 and "recomputed metrics of a cannot be made, a number in its rows is too large: left out" in err
    assert "INT64" not in err and list((tmp_path / "tb").glob("events.out.tfevents.*"))


def test_a_form_that_cannot_be_made_at_all_says_so_in_words(
    call: Call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = "SELECT 9223372036854775807 + x FROM range(1, 2) one(x)"
    monkeypatch.setattr(export_perfetto, "begin_ns", lambda ledger, _: ledger.rows(large))
    code, out, err = call("export", run, "--to", "perfetto", "-o", tmp_path / "t.json")
    assert (code, out, [*tmp_path.iterdir()]) == (2, "", []) and len(err.splitlines()) == 1
    assert "a cannot be written as perfetto: a number in its rows is too large; --to parquet and csv" in err
