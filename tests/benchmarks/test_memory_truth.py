"""The benchmark of memory: what it prints, what it skips, and how near it comes to what was published."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "tests" / "data" / "memory" / "measured.jsonl"


@pytest.fixture(scope="module")
def truth() -> ModuleType:
    import sys

    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("memory_truth")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def rows() -> list[dict[str, object]]:
    return [json.loads(line) for line in MEASURED.read_text().splitlines()]


def test_the_json_says_rows_errors_and_reasons(
    truth: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cases = tmp_path / "cases.jsonl"
    chosen = [
        *rows()[:1],
        {"id": "x/y", "framework": "something", "predictable": "yes", "quantity": "reserved_peak", "value_GiB": 1},
    ]
    cases.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    assert truth.main(["--cases", str(cases), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.strip())
    assert set(found) == {"rows", "skipped", "steady", "peak", "reserved", "exact"}
    assert (found["rows"], found["skipped"]) == (2, {"no reader for something": 1})
    assert set(found["reserved"]) == {"rows", "median", "p95"}
    assert found["exact"] == {"rows": 0, "wrong": 0}


@pytest.fixture(scope="module")
def scored(truth: ModuleType) -> object:
    return truth.score(rows())


def test_near_what_was_published(truth: ModuleType, scored: object) -> None:
    """Rows of litgpt, torchtune, PEFT, prime-rl and torchtitan. The bounds are above what holds now, so that they tell."""
    found = truth.summary(scored)
    assert found["skipped"] == {}
    assert found["steady"]["median"] < 0.005
    assert found["peak"]["median"] < 0.01
    assert found["peak"]["p95"] < 0.03
    assert found["reserved"]["median"] < 0.05


def test_the_half_that_nobody_tuned_on(truth: ModuleType, scored: object) -> None:
    names = {str(row["id"]) for row in rows() if truth.half(row) == "report"}
    chosen = [one for one in scored.scores if one.row in names]  # type: ignore[attr-defined]
    found = truth.summary(truth.Result(rows=len(names), scores=chosen))
    assert found["peak"]["median"] < 0.01
    assert found["reserved"]["median"] < 0.05


def test_a_wrong_prediction_counts(truth: ModuleType) -> None:
    row = {"id": "a", "quantity": "allocation"}
    one = truth.Score(row="a", family="f", kind="exact", name="exact", measured=2**32, predicted=2**32 + 2**22 + 2**21)
    near = truth.Score(row="a", family="f", kind="exact", name="exact", measured=2**32, predicted=2**32 + 2**22)
    assert one.wrong and not near.wrong
    assert truth.scores_of({**row, "predictable": "partial"}).startswith("configuration not complete")
    assert truth.scores_of({**row, "score": False}).startswith("not marked")


def test_bad_input_is_one_line(truth: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{}\n{")
    assert truth.main(["--cases", str(broken)]) == 2
    assert f"{broken}:2: no JSON object" in capsys.readouterr().err
    assert truth.main(["--cases", str(tmp_path / "none")]) == 2
    assert "none: No such file" in capsys.readouterr().err


SINGLE_FAMILY = {
    "metamath_longest_batch_tokens", "metamath_mean_batch_tokens", "cublas_workspace_before_hopper",
    "nf4_bytes_per_weight", "nf4_double_quantized_bytes_per_weight",
}  # fmt: skip


def test_what_each_constant_moves(truth: ModuleType) -> None:
    """A constant that moves one family only has its physical reason beside it; no other does."""
    from flowledger.tables.constants import constants

    families: dict[str, list[dict[str, object]]] = {}
    for row in rows():
        families.setdefault(str(row["framework"]), []).append(row)
    chosen = [row for members in families.values() for row in [*members[:1], *members[-1:]]]
    moved = truth.moved(chosen)
    single = {name for name, touched in moved.items() if len(touched) == 1}
    assert single <= SINGLE_FAMILY
    assert all(len(constants()[name].reason) > 20 for name in single)
    assert len(moved["replayed_fragmentation"]) > 1
