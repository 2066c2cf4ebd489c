"""The launch benchmark in small: its figures, and that it notices what differs."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CASES = Path(__file__).resolve().parents[1] / "data/verl/launches.jsonl"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("verl_launches")


def _rows() -> list[dict[str, object]]:
    return [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]


def test_every_recorded_launch_agrees_with_hydra(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--cases", str(CASES), "--version", "0.9.1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    figures = printed["0.9.1"]
    assert (figures["launches"], figures["resolved"], figures["refused"], figures["wrong"]) == (22, 14, 8, 0)
    assert set(printed) == {"0.9.1", "head", "predicted_failures"}
    stopped = [row[0] for row in printed["predicted_failures"] if row[1:] == ["composition", "launch"]]
    assert stopped == [row["script"] for row in _rows() if str(row["script"]).startswith("refused")]
    assert all(len(row) == 3 for row in printed["predicted_failures"])


def test_a_launch_that_hydra_would_treat_otherwise_is_a_fault(bench: ModuleType, tmp_path: Path) -> None:
    cases = tmp_path / "cases.jsonl"
    good, bad = {"0.9.1": "composes"}, {"0.9.1": "refused: Could not override 'trainer.nodes'."}
    launch = {"module": "verl.trainer.main_ppo", "config_name": None}
    rows = [
        {"script": "a.sh", "launches": [{**launch, "overrides": ["trainer.nodes=1"], "hydra": good}]},
        {"script": "b.sh", "launches": [{**launch, "overrides": ["trainer.nnodes=1"], "hydra": bad}]},
        {"script": "c.sh", "launches": [{**launch, "overrides": ["trainer.nodez=1"], "hydra": bad}]},
    ]
    cases.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = bench.score(cases, "0.9.1", None)
    assert (found.launches, found.refused, len(found.faults)) == (3, 0, 3)


def test_a_leaf_that_differs_is_counted(bench: ModuleType) -> None:
    found = bench.Score()
    bench._compare(found, "a.sh", {"x": 1, "y": True, "z": None}, {"x": 1.0, "y": True, "w": None})
    assert (found.values, found.wrong) == (4, 3)  # 1 is not 1.0, and z and w stand on one side only


def test_the_table_is_held_against_leaves_from_elsewhere(bench: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "verl_defaults_head_fsdp.json").write_text('{"trainer.nnodes": 2}', encoding="utf-8")
    found = bench.Score()
    bench.held_against(tmp_path, "head", found)
    assert found.wrong == found.values > 900
