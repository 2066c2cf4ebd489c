"""What the driver says of this process, asked seldom, and nothing where it says nothing."""

import os

import pytest
from played_gpu import GIB, Gpu, Nvml

from flowledger.record.gpu.cuda import InUse
from flowledger.record.gpu.device_memory import DeviceMemory
from flowledger.record.gpu.nvml import FLOOR_NS, ProcessMemory

S = 1_000_000_000


def process(nvml):
    return ProcessMemory(lambda: nvml, nvml.clock)


def plain(work, *args):
    return work(*args)


def test_the_memory_of_this_process_is_that_of_its_number_alone():
    reading = process(Nvml((1, 5 * GIB), (os.getpid(), 7 * GIB), (2, GIB)))
    assert reading.used(Gpu(), 0) == 7 * GIB


def test_it_is_asked_at_most_every_ten_seconds():
    nvml = Nvml()
    reading = process(nvml)
    first = reading.used(Gpu(), 0)
    nvml.now += FLOOR_NS - 1
    assert (first, reading.used(Gpu(), 0)) == (10 * GIB, None)
    nvml.now += 1
    assert reading.used(Gpu(), 0) == 10 * GIB
    assert nvml.calls == ["init", "GPU-0", "processes", "processes"]


def test_a_slow_driver_is_asked_for_a_two_thousandth_of_the_time_only():
    nvml = Nvml(price_ns=S // 10)  # 0.1 s: once in 200 s
    init = nvml.nvmlInit
    nvml.nvmlInit = lambda: (init(), setattr(nvml, "now", nvml.now + S))  # to begin takes a second, and happens once
    reading = process(nvml)
    asked = 0
    for _ in range(1000):
        asked += reading.used(Gpu(), 0) is not None
        nvml.now += S
    assert asked == 5  # at 1, 202, 403, 604 and 805 s of a thousand


def test_without_the_package_there_is_no_reading_and_no_second_try():
    tries = []

    def load():
        tries.append(1)
        raise ImportError("No module named 'pynvml'")

    reading = ProcessMemory(load)
    assert [reading.used(Gpu(), 0), reading.used(Gpu(), 0)] == [None, None]
    assert tries == [1]


@pytest.mark.parametrize("processes", [((1, GIB),), ((os.getpid(), None),)], ids=["other number", "no size"])
def test_where_the_driver_does_not_know_this_process_it_is_not_asked_again(processes):
    nvml = Nvml(*processes)
    reading = process(nvml)
    assert reading.used(Gpu(), 0) is None
    nvml.now += 10 * FLOOR_NS
    assert reading.used(Gpu(), 0) is None
    assert nvml.calls.count("processes") == 1


def test_an_error_of_nvml_passes_once_and_ends_the_readings():
    nvml = Nvml()
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(RuntimeError("Driver Not Loaded"))
    reading = process(nvml)
    with pytest.raises(RuntimeError, match="Driver Not Loaded"):
        reading.used(Gpu(), 0)
    assert reading.used(Gpu(), 0) is None


def test_nvml_is_let_go_once():
    nvml = Nvml()
    reading = process(nvml)
    reading.used(Gpu(), 0)
    reading.close()
    reading.close()
    assert nvml.calls[-1] == "shutdown"
    assert nvml.calls.count("shutdown") == 1
    assert reading.used(Gpu(), 0) is None


def test_outside_is_what_torch_has_not_reserved():
    gpu = Gpu()
    first = gpu.allocator.take(6 * GIB)
    gpu.allocator.take(2 * GIB)
    gpu.allocator.give_back(first)  # reserved stays 8 GiB
    memory = DeviceMemory(plain, InUse(gpu.find), process(Nvml()))
    assert memory.outside() == (10 * GIB, 2 * GIB)


def test_nothing_is_asked_of_the_driver_before_the_job_has_allocated_or_while_it_captures():
    gpu, nvml = Gpu(), Nvml()
    memory = DeviceMemory(plain, InUse(gpu.find), process(nvml))
    assert memory.outside() is None
    gpu.allocator.take(GIB)
    gpu.capturing = True
    assert memory.outside() is None
    assert nvml.calls == []
    gpu.capturing = False
    assert memory.outside() is not None
