"""What a process calls its GPU, from the driver's own files."""

from pathlib import Path

import pytest

from flowledger.record.gpu.named import named
from flowledger.tables.gpus import gpu

# As the driver 570 writes it (NVIDIA driver README, chapter on /proc).
TOLD = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 145\nGPU UUID: \t GPU-0\nBus Location: \t 0000:1b:00.0\n"


def driver(folder: Path, text: str = TOLD) -> Path:
    (folder / "0000:1b:00.0").mkdir()
    (folder / "0000:1b:00.0" / "information").write_text(text)
    return folder


def test_the_model_is_one_that_the_table_of_devices_has(tmp_path: Path) -> None:
    assert named({}, driver(tmp_path)) == "NVIDIA H100 80GB HBM3"
    assert gpu("NVIDIA H100 80GB HBM3").flops("bfloat16") == pytest.approx(989e12, rel=0.01)


@pytest.mark.parametrize("visible", ["", "-1"])
def test_a_process_that_may_see_none_is_on_the_cpu(tmp_path: Path, visible: str) -> None:
    assert named({"CUDA_VISIBLE_DEVICES": visible}, driver(tmp_path)) == "cpu"


@pytest.mark.parametrize("text", ["", "Model:\n", "GPU UUID: x\n"])
def test_a_driver_that_says_nothing_is_no_gpu(tmp_path: Path, text: str) -> None:
    assert named({}, driver(tmp_path, text)) == "cpu"


def test_a_machine_without_a_driver_is_a_cpu(tmp_path: Path) -> None:
    assert named({}, tmp_path / "none") == "cpu"
