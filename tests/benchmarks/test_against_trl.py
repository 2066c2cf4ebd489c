"""The comparison with TRL in small: its arithmetic, its own side, and, where TRL is installed, both."""

import argparse
import importlib
import importlib.util
import json
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("trl_sides")


@pytest.fixture
def against(sides: ModuleType) -> ModuleType:
    return importlib.import_module("against_trl")


@pytest.fixture
def small(against: ModuleType) -> Any:
    """Two prompts of 4 and 6 tokens, two responses of 3 tokens each."""
    return replace(
        against.CASES[0], hidden_size=16, layers=1, heads=2, kv_heads=1, ffn_size=16, prompts=2, group_size=2,
        prompt_tokens=(4, 6), response_tokens=3, micro_batch=2, steps=1, bar=0.0,
    )  # fmt: skip


def _asked(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"kl": 0.0, "threads": 1, "steps": None, "peak": None, **changes})


def test_without_trl_it_says_what_to_install(
    against: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert against.main(["--quick"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and 'pip install "trl==1.16.*"' in said


@pytest.mark.parametrize(("ratio", "code"), [(2.01, 0), (1.99, 1)])
def test_a_ratio_below_its_bar_is_a_failure(
    against: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ratio: float, code: int
) -> None:
    made: dict[str, Any] = {key: {} for key in ("split", "split_cpu", "peak_bytes")} | {
        "ratio": ratio, "ratio_cpu": 3.0, "ratio_recorded": 1.5, "peak_ratio": 0.5,
    }  # fmt: skip
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(against, "figures", lambda case, asked: made)
    assert against.main(["--quick"]) == code
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["ratio_tiny"], told["peak_ratio"]) == (ratio, 0.5)
    assert "ratio_30m" not in told


def test_the_larger_model_has_thirty_million_parameters(against: ModuleType) -> None:
    """Per layer q and o of H x H, k and v of H x H/2, three of H x F; embeddings of 264 tokens."""
    case = against.CASES[1]
    assert case.heads == 2 * case.kv_heads
    H, F = case.hidden_size, case.ffn_size
    assert case.layers * (3 * H * H + 3 * H * F) + 264 * H == pytest.approx(30e6, rel=0.01)


def test_prompts_are_spread_evenly_from_the_shortest_to_the_longest(sides: ModuleType, small: Any) -> None:
    assert [len(text) for text in sides._prompts(replace(small, prompts=3))] == [4, 5, 6]


def test_the_middle_is_the_median_of_each_part(sides: ModuleType, against: ModuleType) -> None:
    steps = [sides.Taken(wall={"step": a, "update": b}, cpu={"step": -a}) for a, b in ((3, 1), (1, 5), (2, 9))]
    assert against.middle(steps) == sides.Taken(wall={"step": 2, "update": 5}, cpu={"step": -2})


def test_a_stopwatch_gives_each_part_its_time_and_the_rest_to_other(sides: ModuleType) -> None:
    watch = sides.Stopwatch()
    watch.timing("update")(time.sleep)(0.02)
    watch.timing("generate", lambda: False)(time.sleep)(0.03)
    taken = watch.end()
    assert taken.wall["update"] == pytest.approx(0.02, abs=0.015)
    assert taken.wall["generate"] == taken.wall["log_prob"] == 0 and taken.wall["other"] >= 0.03
    assert sum(taken.wall.values()) == pytest.approx(2 * taken.wall["step"])
    watch.begin()
    assert watch.end().wall["update"] == 0


def test_the_peak_is_the_highest_running_sum_in_the_order_of_time(against: ModuleType) -> None:
    """+100, -100, +70, +50, -50: 120 at the fourth."""
    moves = [(3, 70), (1, 100), (2, -100), (5, -50), (4, 50)]
    events = [_event("[memory]", at, size) for at, size in moves] + [_event("aten::mm", 0, 999)]
    results = SimpleNamespace(events=lambda: events)
    assert against._highest(SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))) == 120


def _event(name: str, at: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(name=lambda: name, start_ns=lambda: at, nbytes=lambda: size)


def test_our_side_samples_every_token_that_it_is_asked_for(sides: ModuleType, small: Any, tmp_path: Path) -> None:
    from flowledger.flow.seams import replaced

    made: list[Any] = []

    def keep(original: Any) -> Any:
        return lambda **inputs: made.append(original(**inputs)) or made[-1]

    with sides.ours(sides.write_inputs(small, tmp_path, kl_coef=0.1)) as (world, step):
        with replaced([("flowledger.run.stages:rollout", keep)]):
            taken = step()
        assert world.reference is not None and world.weights.shared
    assert made[0].response_mask.shape == (4, 3) and bool(made[0].response_mask.all())
    assert min(taken.wall[part] for part in ("generate", "log_prob", "update")) > 0
    assert taken.wall["step"] >= taken.wall["generate"] + taken.wall["update"]


def test_our_peak_holds_weights_optimizer_and_gradients(against: ModuleType, small: Any) -> None:
    """Four copies of the weights in float32 and more, but not ten times that."""
    weights = 4 * (264 * 16 + 16 * 16 * 3 + 3 * 16 * 16 + 3 * 16)
    others = against.living_bytes()  # what tests before this one have left
    held = against.peak(small, "ours", _asked()) - others
    assert 4 * weights < held < 40 * weights


def test_both_sides_take_turns_on_the_same_batch(against: ModuleType, small: Any) -> None:
    pytest.importorskip("trl")
    taken = against.alternate(small, _asked())
    assert {side: len(steps) for side, steps in taken.items()} == {"trl": 1, "ours": 1, "recorded": 1}
    assert all(taken[side][0].wall[part] > 0 for side in taken for part in ("generate", "update", "other"))
