"""Real public reports, in our own words, with labels that the code never sees; the verb's glue; and the benchmark that scores them."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from flowledger.cli.reports import CALL, planned, reported
from flowledger.diagnose.reports.report import Report
from flowledger.flow.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests/data/reports/cases.jsonl"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("bug_reports")


def test_four_of_five_are_told_and_none_wrongly(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.jsonl"
    assert bench.main(["--cases", str(CASES), "--out", str(out)]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["reports"] == figures["right"] + figures["cannot_tell"] + figures["wrong"] == 32
    assert figures["decidable_right"] >= 0.8 * 27 and figures["wrong"] == 0
    assert figures["undecidable_cannot_tell"] == 5
    assert figures["peer"]["right"] < figures["right"] / 2
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert all(row["needs"] for row in rows if row["verdict"] == "skipped")


def test_of_further_reports_few_are_wrong_and_none_surely(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fifth of what was collected later: what the inputs do not decide stays open."""
    assert bench.main(["--cases", str(ROOT / "tests/data/reports/more_cases.jsonl")]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    decidable = sum(figures[f"decidable_{verdict}"] for verdict in ("right", "cannot_tell", "wrong"))
    assert figures["reports"] == 47 and decidable == 41
    assert figures["decidable_right"] >= 0.8 * decidable and figures["wrong"] <= 2 and figures["confidently_wrong"] == 0
    assert figures["undecidable_cannot_tell"] >= 0.8 * (47 - decidable)


def test_of_reports_collected_later_four_of_five_are_told(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written down with their labels before any of them was answered; the rules were then extended by their mechanisms."""
    assert bench.main(["--cases", str(ROOT / "tests/data/reports/later_cases.jsonl")]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    decidable = sum(figures[f"decidable_{verdict}"] for verdict in ("right", "cannot_tell", "wrong"))
    assert figures["reports"] == 88 and decidable == 71
    assert figures["decidable_right"] >= 0.8 * decidable and figures["wrong"] <= 4 and figures["confidently_wrong"] == 0
    assert figures["undecidable_wrong"] <= 3


def test_of_fresh_reports_four_of_five_are_told_and_none_surely_wrong(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine sets of threads, each scored once before anything was changed for it: half were told then."""
    out = tmp_path / "answers.jsonl"
    cases = ROOT / "tests/data/reports/fresh_cases.jsonl"
    assert bench.main(["--cases", str(cases), "--out", str(out)]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    decidable = sum(figures[f"decidable_{verdict}"] for verdict in ("right", "cannot_tell", "wrong"))
    assert figures["reports"] == 204 and decidable == 182
    assert figures["decidable_right"] >= 0.8 * decidable and figures["wrong"] <= 8 and figures["confidently_wrong"] == 0
    assert figures["undecidable_wrong"] <= 3
    labels = {
        row["id"]: row["verdict_label"] for row in map(json.loads, cases.read_text(encoding="utf-8").splitlines())
    }
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    sure = [row for row in rows if row["verdict"] != "skipped" and row["confidence"] >= 0.8]
    assert len(sure) >= 10 and all(bench.judged(row, labels[row["id"]]) == "right" for row in sure)


def test_of_the_newest_reports_none_is_surely_wrong(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight sets of threads, each scored once before anything was changed for it: half were told then."""
    out = tmp_path / "answers.jsonl"
    cases = ROOT / "tests/data/reports/new_cases.jsonl"
    assert bench.main(["--cases", str(cases), "--out", str(out)]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    decidable = sum(figures[f"decidable_{verdict}"] for verdict in ("right", "cannot_tell", "wrong"))
    assert figures["reports"] == 183 and decidable == 161
    assert figures["decidable_right"] >= 0.85 * decidable and figures["wrong"] <= 10
    assert figures["confidently_wrong"] == 0
    others = [json.loads(line) for line in (ROOT / "tests/data/reports/fresh_cases.jsonl").read_text().splitlines()]
    new = {row["id"] for row in map(json.loads, cases.read_text(encoding="utf-8").splitlines())}
    assert len(new) == 183 and not new & {row["id"] for row in others}


def test_without_labels_it_counts_what_is_told(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = tmp_path / "cases.jsonl"
    cases.write_text(json.dumps({"id": "x", "symptom": "training is bad"}) + "\n", encoding="utf-8")
    assert bench.main(["--cases", str(cases)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cannot_tell"] == 1


def test_the_judge_does_not_count_the_reporters_own_words(bench: ModuleType) -> None:
    label = {"decidable": True, "accept": [["optimizer"], ["kv", "scale"]]}
    told = {"verdict": "fail", "confidence": 0.6, "id": "x"}
    assert (
        bench.judged({**told, "sentence": "weights are stale. The report says: “the optimizer is old”"}, label)
        == "wrong"
    )
    assert bench.judged({**told, "sentence": "the KV scales are reset"}, label) == "right"
    assert bench.judged({**told, "verdict": "skipped", "sentence": "cannot tell"}, label) == "cannot_tell"


def test_labels_were_written_for_every_report_of_the_public_set() -> None:
    rows = [
        json.loads(line) for line in (ROOT / "tests/data/reports/labels.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len({row["id"] for row in rows}) == len(rows) == 86
    assert sum(row["decidable"] for row in rows) == 51 and all(row["accept"] for row in rows)


def test_a_report_in_a_file_is_answered_with_the_checks_of_its_configuration_beside(tmp_path: Path) -> None:
    config = {"data.train_batch_size": 512, "trainer.n_gpus_per_node": 6, "trainer.nnodes": 1}
    symptom = "AssertionError: only support equal chunk. Got size of DataProto 512 and chunk 6."
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"framework": "verl", "config": config, "symptom": symptom}), encoding="utf-8")
    told = reported(str(path))
    assert told[0].id == "unequal_chunks"
    checks = {row.id: row for row in told[1:]}
    assert "verl.L3" in checks and checks["verl.L3"].confidence == 0.5  # 512 % 6 = 2: refused at launch


def test_a_fragment_that_is_no_configuration_is_not_planned() -> None:
    assert planned(Report(framework="verl", config={"a": 1, "b": 2, "c": 3})) == []
    assert planned(Report(framework="verl", config={"data.train_batch_size": 8})) == []
    assert planned(Report(framework="unheard-of", config={"n": 1, "m": 2, "k": 3})) == []


def test_a_missing_text_is_refused() -> None:
    with pytest.raises(BadInput, match="empty"):
        reported("  ")


@pytest.mark.parametrize("page", ["reports.md", "reports.zh-CN.md"])
def test_the_pages_example_is_answered_as_the_page_says(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    report = text.partition("```json\n")[2].partition("```")[0]
    assert reported(report)[0].message in " ".join(text.split())


@pytest.mark.timeout(20)
def test_a_log_of_one_endless_word_is_answered() -> None:
    """`a_a_a_…`: where a name of a function may begin and end at many places, looking for one takes no longer."""
    assert CALL.findall("a_" * 50_000 + " (in compute_log_prob)") == [("", "compute_log_prob")]
