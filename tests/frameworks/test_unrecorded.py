"""The real frameworks make their two steps here, untouched: the ground on which recorded runs stand."""

import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import environments
import launch
import metrics
import pytest

LAUNCHES: dict[str, Callable[[Path], launch.Launch]] = {
    "verl_v0": launch.verl_v0,
    "verl_v1": launch.verl_v1,
    "trl": launch.trl,
    "trl_ddp": lambda folder: launch.trl(folder, processes=2),
}
# What each calls the numbers that are the same thing: loss, mean reward, longest response, gradient norm.
NAMES = {
    "verl": ("actor/loss", "critic/rewards/mean", "response_length/max", "actor/grad_norm"),
    "trl": ("loss", "reward", "completions/max_length", "grad_norm"),
}
IN_FORCE = """
from importlib.metadata import entry_points
for group in ("verl.plugins", "vllm.general_plugins"):
    for point in entry_points(group=group):
        print(point.group, point.name, point.load())  # verl itself keeps quiet about one that fails
from verl.plugin.platform import get_platform
from vllm.model_executor.layers import utils
from vllm.plugins import load_general_plugins
load_general_plugins()
print("platform", get_platform().device_name, "weights", utils.dispatch_cpu_unquantized_gemm.__module__)
"""


@pytest.mark.timeout(2 * launch.TIMEOUT_S)
@pytest.mark.parametrize("name", LAUNCHES)
def test_two_steps_are_made_and_measured(name: str, folder: Path, tmp_path: Path) -> None:
    printed = launch.run(LAUNCHES[name](folder), tmp_path / "log.txt")
    framework = name.split("_")[0]
    steps = metrics.of_verl(printed) if framework == "verl" else metrics.of_trl(printed)
    assert len(steps) == launch.STEPS, printed[-3000:]
    loss, reward, longest, norm = NAMES[framework]
    for step in steps:
        assert math.isfinite(step[loss])
        assert 0 < step[reward] < 1
        assert 1 < step[longest] <= launch.RESPONSE_TOKENS
        assert step[norm] > 0


@pytest.mark.timeout(4 * launch.TIMEOUT_S)
def test_trl_repeats_itself_with_the_same_seed_only(folder: Path, tmp_path: Path) -> None:
    def steps(seed: int, name: str) -> list[dict[str, float]]:
        return metrics.timeless(launch.run(launch.trl(folder, seed=seed), tmp_path / name))

    first = steps(1, "first.txt")
    assert first == steps(1, "second.txt")
    assert first != steps(2, "other.txt")


@pytest.mark.timeout(launch.TIMEOUT_S)
def test_verl_and_vllm_are_given_their_platform() -> None:
    command = [str(environments.python("verl")), "-c", IN_FORCE]
    told = subprocess.run(command, env=launch.environment(launch.VERL_ENVIRONMENT), capture_output=True, text=True)
    assert told.stdout.splitlines()[-1:] == ["platform cpu weights vllm_cpu"], told.stdout + told.stderr
