"""The verb `export` as a user types it: which options mean something, where it writes, and one clear line where it cannot."""

import gzip
import json
import resource
from pathlib import Path

import pytest

from flowledger.cli import export
from flowledger.ledger.reader import Ledger
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
