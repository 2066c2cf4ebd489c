"""The benchmarks in small: what they print last, and that they can fail."""

import importlib
import json
import math
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = [
    f"--set={setting}"
    for setting in (
        "model.tiny.hidden_size=32", "model.tiny.heads=2", "model.tiny.kv_heads=1", "model.tiny.ffn_size=64",
        "rollout.samples_per_prompt=2", "rollout.max_response_tokens=4", "actor.micro_batch.samples=2",
    )
]  # fmt: skip


@pytest.fixture
def learns(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return _module("learns", monkeypatch)


@pytest.fixture
def recorder(meter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return _module("recorder", monkeypatch)


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = _module("meter", monkeypatch)
    monkeypatch.setattr(module, "BURN_NS", 2_000_000)  # beside steps as short as these it is as slow as 5 ms elsewhere
    return module


def _module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module(name)
    if hasattr(module, "STARTED"):
        monkeypatch.setattr(module, "STARTED", time.monotonic())
    return module


def _last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


# ------------------------------------------------------------------------------------------------------- learns


def test_a_tiny_model_learns_more_than_a_blind_policy_can(
    learns: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert learns.main(["--quick", "--json"]) == 0
    grpo = _last_line(capsys)["estimators"]["grpo"]
    assert set(grpo) >= {"chance", "final", "seconds", "seeds", "reached"}
    assert grpo["chance"] < 1 / 3 < 0.5 < grpo["final"]
    assert grpo["seeds"] == [0] and grpo["reached"] >= learns.WINDOW - 1


def test_a_model_that_cannot_learn_misses_the_bar(
    learns: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learns, "CHANCE_STEPS", 2)
    few = ("rollout.samples_per_prompt=4", "actor.micro_batch.samples=24", f"steps={learns.WINDOW}")
    assert learns.main(["--seeds=0", *(f"--set={one}" for one in few), "--set=optim.lr=0", "--json"]) == 1
    grpo = _last_line(capsys)["estimators"]["grpo"]
    assert grpo["reached"] is None and grpo["final"] < 1 / 3


def test_chance_is_what_the_classes_share_of_all_tokens_says(learns: ModuleType) -> None:
    """10, 26 and 26 of 264 tokens: 0.078 on average, were every token equally likely; random weights favour some."""
    assert learns._chance(["seed=1"]) == pytest.approx(62 / 3 / 264, abs=0.05)


def test_a_summary_speaks_of_the_worst_seed(learns: ModuleType) -> None:
    good = learns.Learnt(seed=1, chance=0.1, final=0.99, reached=20, steps=80, seconds=9.0, cpu_s=8.0)
    bad = learns.Learnt(seed=2, chance=0.2, final=0.70, reached=None, steps=80, seconds=11.0, cpu_s=8.0)
    told = learns.summary([good, bad])
    assert (told["chance"], told["final"], told["seconds"], told["reached"]) == (0.2, 0.70, 11.0, None)
    assert bad.missed(0.9, 180) and not good.missed(0.9, 180) and good.missed(0.9, 8)


# ----------------------------------------------------------------------------------------------------- recorder


def test_the_recorder_benchmark_ends_with_its_figures_and_catches_the_control(
    recorder: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.main([*SMALL, "--least-s=0", "--pairs=2", "--quick", "--json"])  # such a short step keeps no target
    told = _last_line(capsys)
    assert set(told) >= {
        "overhead_steps", "overhead_tensors", "ab_low", "ab_high", "control_caught", "ns_per_row", "bytes_per_step",
    }  # fmt: skip
    assert told["control_caught"] is True
    assert 0 < told["overhead_steps"] < told["overhead_tensors_plain"] < told["control_overhead"]
    blended = (49 * told["overhead_tensors_plain"] + max(0.0, told["overhead_tensors_sampled"])) / 50
    assert told["overhead_tensors"] == pytest.approx(blended, rel=1e-3)
    assert told["dropped"] == 0 and told["ab_pairs"] == 2


def test_a_slow_sink_costs_what_it_burns(meter: ModuleType) -> None:
    with meter.prepared([argument.removeprefix("--set=") for argument in SMALL], least_s=0.0) as bench:
        honest, slow = bench.recorded("steps"), bench.recorded("steps", slow=True)
    burnt = slow.rows * meter.BURN_NS / 1e9
    assert slow.own_s == pytest.approx(burnt + honest.own_s, rel=0.2)


def test_steps_shorter_than_asked_get_more_layers(meter: ModuleType) -> None:
    settings = [argument.removeprefix("--set=") for argument in SMALL]
    with meter.prepared(settings, least_s=0.0) as bench:
        short = bench.plain().cpu_s
    with meter.prepared(settings, least_s=2 * short) as bench:
        assert bench._world.config.model.tiny.layers > meter.LAYERS


def test_the_meter_gives_each_its_own_time(meter: ModuleType) -> None:
    clock = meter.Meter()
    job = clock.on_behalf_of("job")(lambda: _burn(0.02))
    watched = clock.on_behalf_of("recorder")(lambda: (_burn(0.01), job()))
    watched()
    _burn(0.03)
    clock.turn("job")
    assert clock.spent["recorder"] / 1e9 == pytest.approx(0.01, abs=0.005)
    assert clock.spent["job"] / 1e9 == pytest.approx(0.05, abs=0.01)


def test_the_interval_is_students(recorder: ModuleType) -> None:
    """1, 2, 3: mean 2, deviation 1, t(2 degrees, 97.5 %) 4.30."""
    low, high = recorder.interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.30 / math.sqrt(3), 2 + 4.30 / math.sqrt(3)))
    assert recorder.interval([1.0]) == (-math.inf, math.inf)


def _burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
