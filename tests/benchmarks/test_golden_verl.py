"""The golden benchmark: every vector agrees, and it notices what differs and what it cannot read."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests/data"
KL = ("kl/k1/out", "kl/k1/grad", "kl/k3/out", "kl/compute_rewards_0.05")
Write = Callable[..., Path]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("golden_verl")


@pytest.fixture
def small(tmp_path: Path) -> Write:
    """Writes a folder of cases: inputs and some KL vectors of one case, with changes."""
    stored = np.load(DATA / "verl_golden.npz")
    inputs = [name for name in stored.files if name.startswith("base_f32/in/")]
    arrays = {name: stored[name] for name in (*inputs, *(f"base_f32/{name}" for name in KL))}
    facts = json.loads((DATA / "verl_golden.json").read_text(encoding="utf-8"))
    facts = {name: facts[name] for name in ("inputs", "adv", "pg", "pg_config")}

    def write(more: dict[str, np.ndarray] | None = None, **changed: Any) -> Path:
        np.savez(tmp_path / "core_algos.npz", **arrays | (more or {}))
        (tmp_path / "golden.json").write_text(json.dumps(facts | changed), encoding="utf-8")
        return tmp_path

    return write


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_vector_agrees_in_value_and_gradient(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    status = bench.main(["--cases", str(DATA)])
    figures = printed(capsys)
    assert (status, figures["failed"]) == (0, [])
    assert figures["compared"] >= 4700 and figures["worst_relative"] <= 1e-5
    stored = np.load(DATA / "verl_golden.npz").files
    outputs = [name for name in stored if "/in/" not in name and not name.endswith(("_in", "tf/logits", "tf/labels"))]
    assert len([name for name in figures["left_out"] if name in outputs]) == 4  # three of bfloat16, one of masks


def test_a_small_folder_agrees_and_a_changed_number_does_not(
    bench: ModuleType, small: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--cases", str(small())]) == 0
    figures = printed(capsys)
    assert figures["compared"] == len(KL)
    assert {"rc", "adaptive_kl", "fails"} <= figures["left_out"].keys()  # this folder's facts say nothing of them
    for name in KL:
        folder = small()
        arrays = dict(np.load(folder / "core_algos.npz"))
        arrays[f"base_f32/{name}"] = arrays[f"base_f32/{name}"] + 2e-5 * np.abs(arrays[f"base_f32/{name}"]).max()
        np.savez(folder / "core_algos.npz", **arrays)
        assert bench.main(["--cases", str(folder)]) == 1
        assert printed(capsys)["failed"] == [f"base_f32/{name}"]


@pytest.mark.parametrize(
    "name",
    [
        "kl/k9/out", "kl/k1/curvature", "kl/compute_rewards_much", "adv/grpo/norm=maybe/advantages",
        "adv/grpo/temper=1/advantages", "adv/nobody/default/advantages", "pg/vanilla/token-mean/elsewhere/isw=0/loss",
        "pg/vanilla/token-median/local/isw=0/loss", "rc/is=token/norm=0/rs=token_k9/th=2.0/mask", "zz/k1/out",
        "rc/is=token/norm=0/rs=None/th=None/veto=1/mask", "tf/masked_median", "median",
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_a_failure(
    name: str, bench: ModuleType, small: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--cases", str(small({f"base_f32/{name}": np.zeros((12, 12), np.float32)}))]) == 1
    assert printed(capsys)["failed"] == [f"base_f32/{name}"]


def test_unknown_facts_and_settings_are_failures(
    bench: ModuleType, small: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--cases", str(small(surprise=1))]) == 1
    assert printed(capsys)["failed"] == ["surprise"]
    assert bench.main(["--cases", str(small(fails={"base_f32/kl/k1": "", "something else": ""}))]) == 1
    assert printed(capsys)["failed"] == ["fails/base_f32/kl/k1/refused", "fails/something else/refused"]


def test_cases_of_other_names_shapes_and_dtypes_are_read(
    bench: ModuleType, small: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    score = torch.tensor([1.0, 0.0, 5.0], dtype=torch.float64)  # groups a, b, a: 1 and 5, and 0 alone
    want = torch.tensor([-2 / 8**0.5, 0, 2 / 8**0.5], dtype=torch.float64)[:, None] * torch.ones(3, 2)
    named = {name: torch.zeros(3, 2, dtype=torch.float64) for name in ("old_log_prob", "values", "sum_pi_squared")}
    named |= {"response_mask": torch.ones(3, 2).double(), "reward_baselines": torch.zeros(3).double()}
    named["token_level_rewards"] = torch.stack([score * 0, score], 1)
    arrays = {f"other/in/{name}": array.numpy() for name, array in named.items()}
    arrays["other/adv/grpo/norm=True/advantages"] = want.numpy()
    folder = small(arrays, inputs={"other": {"index": ["a", "b", "a"]}, "base_f32": {"index": ["a"] * 12}})
    assert bench.main(["--cases", str(folder)]) == 0
    assert printed(capsys)["compared"] == len(KL) + 1


def test_distance_is_relative_to_the_largest_reference_and_skips_only_what_is_not_finite_in_it(
    bench: ModuleType,
) -> None:
    tensor = torch.tensor
    assert bench.distance(tensor([1.0, 99.0]), tensor([2.0, 100.0])) == pytest.approx(0.01)
    assert bench.distance(tensor([0.5]), tensor([0.0])) == 0.5
    assert bench.distance(tensor([1.0, 3.0]), tensor([torch.nan, 3.0])) == 0
    assert bench.distance(tensor([1.0]), tensor([torch.inf])) is None
    assert (
        bench.distance(tensor([torch.nan]), tensor([1.0]))
        == bench.distance(tensor([[1.0]]), tensor([1.0]))
        == torch.inf
    )


def test_a_folder_without_the_files_is_one_line(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--cases", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path} has neither core_algos.npz and golden.json nor verl_golden.npz and verl_golden.json\n"
    )
