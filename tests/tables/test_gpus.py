"""Devices resolve however people write them, and their figures lie where physics and marketing leave them."""

import re

import pytest

from flowledger.flow.errors import BadInput
from flowledger.tables.gpus import GIB, Gpu, gpu, gpus

ROWS = tuple(gpus().values())


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100-80g", "H100-SXM5-80GB"),
        ("H100", "H100-SXM5-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),  # as torch names it
        ("NVIDIA H100 PCIe", "H100-PCIE-80GB"),
        ("a100 80gb", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("NVIDIA A800-SXM4-80GB", "A800-SXM4-80GB"),
        ("H100 96GB HBM2e", "H100-96GB"),
        ("h200_141g", "H200-SXM5-141GB"),
        ("NVIDIA H20", "H20-96GB"),
        ("NVIDIA B200", "B200-180GB"),
        ("NVIDIA GB200", "GB200-186GB"),
        ("NVIDIA B300 SXM6 AC", "B300-288GB"),
        ("NVIDIA L40S", "L40S-48GB"),
        ("A10G 24GB", "A10G-24GB"),
        ("NVIDIA RTX A6000", "RTX-A6000-48GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090-24GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("Tesla T4", "T4-16GB"),
        ("AMD Instinct MI300X", "MI300X-192GB"),
        ("Ascend910B2", "Ascend-910B2"),
        ("Ascend910_93", "Ascend-910C"),
        ("gaudi3", "Gaudi3-128GB"),
    ],
)
def test_a_device_resolves_as_people_and_drivers_write_it(written: str, name: str) -> None:
    assert gpu(written).name == name


@pytest.mark.parametrize(
    ("written", "hint"), [("h1000", "h100"), ("a100-90g", "a100"), ("mi300", None), ("zx", "known are")]
)
def test_an_unknown_device_says_the_nearest(written: str, hint: str | None) -> None:
    if hint is None:
        assert gpu(written).vendor == "amd"
        return
    with pytest.raises(BadInput, match=hint):
        gpu(written)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_process_sees_a_little_less_than_the_driver_and_the_name_say(row: Gpu) -> None:
    assert row.driver_bytes is None or 0.88 * row.driver_bytes < row.memory_bytes < row.driver_bytes
    nominal = re.search(r"-(\d+)GB$", row.name)
    if nominal:
        assert 0.9 * int(nominal[1]) * 1e9 < row.memory_bytes <= int(nominal[1]) * GIB
    assert row.source and re.fullmatch(r"\d{4}-\d\d-\d\d", row.date)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rates_lie_in_the_range_of_real_devices(row: Gpu) -> None:
    """From T4 to B300; a device does 30 to 600 operations in the time of one byte (bandwidth in decimal units)."""
    assert 3e11 <= row.hbm_bytes_per_s <= 8e12
    assert 6e13 <= row.matrix_flops <= 2.6e15
    assert 30 < row.matrix_flops / row.hbm_bytes_per_s < 600
    assert row.link_bytes_per_s < row.hbm_bytes_per_s
    assert (row.sm is not None) == (row.vendor == "nvidia")


@pytest.mark.parametrize(
    ("name", "cores", "mhz"),
    [
        ("a100", 6912, 1410), ("h100", 16896, 1980), ("h100-pcie", 14592, 1755), ("h100-nvl", 16896, 1785), ("b200", 18944, 1980),
        ("l4", 7424, 2040), ("l40s", 18176, 2520), ("l20", 11776, 2520), ("a10", 9216, 1695), ("a40", 10752, 1740),
        ("a6000", 10752, 1800), ("3090", 10496, 1695), ("4090", 16384, 2520), ("5090", 21760, 2407),
        ("v100", 5120, 1530), ("t4", 2560, 1590),
    ],
)  # fmt: skip
def test_float32_is_two_operations_a_core_and_clock(name: str, cores: int, mhz: int) -> None:
    assert gpu(name).flops("float32") == pytest.approx(2 * cores * mhz * 1e6, rel=0.01)
    assert gpu(name).flops("bfloat16") == gpu(name).flops("float16") == gpu(name).matrix_flops


def test_export_versions_have_the_same_memory_and_slower_links() -> None:
    assert gpu("H800").memory_bytes == gpu("H100").memory_bytes
    assert gpu("H800").link_bytes_per_s < gpu("H100").link_bytes_per_s
    assert gpu("A800").link_bytes_per_s < gpu("A100").link_bytes_per_s
    assert gpu("H20").matrix_flops < gpu("H100").matrix_flops


def test_no_two_devices_share_a_spelling() -> None:
    for row in ROWS:
        for name in (row.name, *row.aliases):
            assert gpu(name) is row
