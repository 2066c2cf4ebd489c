"""A GPU that runs out of memory: what the error says, what a snapshot holds by kind and stage, and the rows and finding of it.

The GPU is played. Texts of errors are real ones, of public issues; the snapshot has the format that torch 2.13 documents.
"""

from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from played_gpu import GIB, MIB, Gpu, Rows, played_job

from flowledger.flow.errors import BadInput
from flowledger.flow.seams import Probe
from flowledger.record.attach import attach
from flowledger.record.enrol import asked
from flowledger.record.gpu.blocks import Moment, held
from flowledger.record.gpu.cuda import InUse
from flowledger.record.gpu.device_memory import DeviceMemory
from flowledger.record.gpu.out_of_memory import OutOfMemory, addresses
from flowledger.record.gpu.shortage import Said, said, shortage_in
from flowledger.record.layers import Layers
from flowledger.record.position import Frame
from flowledger.record.recorder import Recorder
from flowledger.record.storages import Lives

JOB = "played_shortage"
PROBES = (
    Probe(stage=None, target=f"{JOB}:step", scope="step"),
    Probe(stage="rollout", target=f"{JOB}:rollout"),
    Probe(stage="update_actor", target=f"{JOB}:update"),
    Probe(stage=None, target=f"{JOB}:forward", scope="call", phase="forward"),
)
TEXT = (
    "CUDA out of memory. Tried to allocate 3.15 GiB. GPU 0 has a total capacity of 39.56 GiB of which 6.80 GiB is free. "
    "Including non-PyTorch memory, this process has 36.61 GiB memory in use. Of the allocated memory 31.66 GiB is "
    "allocated by PyTorch, and 4.11 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is "
    "large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
OLDER = (
    "CUDA out of memory. Tried to allocate 472.00 MiB. GPU 0 has a total capacty of 23.69 GiB of which 7.11 GiB is free. "
    "Process 2006998 has 256.00 MiB memory in use. Including non-PyTorch memory, this process has 16.31 GiB memory in use. "
    "Of the allocated memory 16.01 GiB is allocated by PyTorch, and 7.47 MiB is reserved by PyTorch but unallocated."
)


@pytest.fixture
def job(monkeypatch):
    return played_job(monkeypatch, JOB)


def recorded(work, **options):
    rows = Rows()
    with attach(PROBES, Recorder(rows, level="steps", ops_every=0, **options)), suppress(RuntimeError):
        work()
    return rows


def runs_out(text=TEXT):
    raise torch.OutOfMemoryError(text)


# ---------------------------------------------------------------- what the error says


def test_the_sizes_in_the_text():
    g = 2**30
    assert said(TEXT) == Said(*(round(size * g) for size in (3.15, 39.56, 6.80, 36.61)))
    assert said(OLDER) == Said(472 * MIB, *(round(size * g) for size in (23.69, 7.11, 16.31)))
    assert said("CUDA error: out of memory") == Said()


def after(error, link):
    """An exception raised from another (`__cause__`), or when that one had been dealt with (`__context__`)."""
    later = ValueError("engine died")
    setattr(later, link, error)
    return later


@pytest.mark.parametrize(
    ("error", "means"),
    [
        (torch.OutOfMemoryError(TEXT), True),
        (after(torch.OutOfMemoryError(TEXT), "__cause__"), True),
        (after(torch.OutOfMemoryError(TEXT), "__context__"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("NCCL error: unhandled cuda error. Failed to CUDA calloc async 4 bytes"), True),
        (RuntimeError("The size of tensor a (2) must match"), False),
        (MemoryError(), False),  # the host's
        (KeyError("CUDA out of memory"), False),
    ],
)
def test_which_exceptions_mean_it(error, means):
    assert (shortage_in(error) is not None) is means


# ---------------------------------------------------------------- blocks


def frames(*lines):
    """`file:function`, the innermost first."""
    return [{"filename": file, "line": 7, "name": name} for file, _, name in (line.partition(":") for line in lines)]


SITE = "/venv/lib/python3.11/site-packages/"
FORWARD = (
    SITE + "torch/nn/modules/linear.py:forward",
    SITE + "torch/nn/modules/module.py:_call_impl",
    SITE + "transformers/models/qwen2/modeling_qwen2.py:forward",
)


@pytest.mark.parametrize(
    ("made_by", "stage", "kind"),
    [
        (FORWARD, "update_actor", "activation"),
        (FORWARD, None, "activation"),
        (FORWARD, "old_log_prob", "temporary"),  # nothing is kept for a backward there
        ((), "update_actor", "temporary"),  # backward
        ((SITE + "torch/optim/adam.py:_init_group", SITE + "torch/optim/adam.py:step"), "update_actor", "optimizer"),
        ((SITE + "torch/optim/adam.py:_multi_tensor_adam",), "update_actor", "temporary"),
        ((SITE + "vllm/v1/worker/utils.py:allocate_kv_cache",), None, "kv_cache"),
        ((SITE + "transformers/cache_utils.py:update", *FORWARD), "rollout", "kv_cache"),
        ((SITE + "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:allocate",), "update_actor", "comm_buffer"),
        # What lies within FSDP1's wrapper, or goes through DTensor, is no buffer of a collective.
        ((*FORWARD, SITE + "torch/distributed/fsdp/fully_sharded_data_parallel.py:forward"), None, "activation"),
        ((SITE + "torch/distributed/tensor/_dispatch.py:dispatch", *FORWARD), "update_actor", "activation"),
        ((SITE + "verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py:_init_buffer",), "weight_sync", "comm_buffer"),
    ],
)  # fmt: skip
def test_the_kind_of_a_block_that_no_known_storage_lies_in(made_by, stage, kind):
    gpu = Gpu()
    gpu.allocator.take(GIB, time_us=100, frames=frames(*made_by))
    (one,) = held(gpu.snapshot(), 0, {}, [Moment(50, stage)])
    assert (one.kind, one.stage, one.bytes, one.blocks) == (kind, stage, GIB, 1)


def test_the_place_in_the_code_is_the_innermost_outside_of_torch():
    gpu = Gpu()
    gpu.allocator.take(GIB, frames=frames(*FORWARD))
    gpu.allocator.take(GIB, frames=frames("??:torch::autograd"))
    assert {one.place for one in held(gpu.snapshot(), 0, {}, [])} == {"qwen2/modeling_qwen2.py:7 forward", None}


def test_a_block_belongs_to_the_stage_in_which_it_was_last_given_away():
    gpu = Gpu()
    moments = [Moment(100, "rollout"), Moment(200, None), Moment(300, "update_actor")]
    early = gpu.allocator.take(1, time_us=50)
    for at, size in ((100, 2), (199, 4), (200, 8), (300, 16), (400, 32)):
        gpu.allocator.take(size, time_us=at)
    gpu.allocator.give_back(early)
    again = gpu.allocator.take(64, at=early, time_us=350)  # the same address, later
    assert again == early
    sums = {one.stage: one.bytes for one in held(gpu.snapshot(), 0, {}, moments)}
    assert sums == {"rollout": 6, None: 8, "update_actor": 16 + 32 + 64}


def test_what_the_history_has_forgotten_has_no_stage():
    gpu = Gpu()
    gpu.allocator.take(GIB, time_us=100)
    gpu.allocator.traces[0].clear()
    assert [one.stage for one in held(gpu.snapshot(), 0, {}, [Moment(50, "rollout")])] == [None]


def test_older_snapshots_whose_blocks_have_no_address_are_read_too():
    """torch before 2.3: blocks fill their segment in order."""

    def block(size, state):
        return {"size": size, "state": state}

    blocks = [block(10, "active_allocated"), block(20, "inactive"), block(30, "active_allocated")]
    snapshot = {"segments": [{"device": 0, "address": 1000, "blocks": blocks}]}
    assert {one.kind: one.bytes for one in held(snapshot, 0, {1035: "param", 1000: "grad"}, [])} == {
        "param": 30,
        "grad": 10,
    }


def test_of_two_storages_in_one_block_the_surer_says_what_it_is():
    gpu = Gpu()
    start = gpu.allocator.take(GIB)
    (one,) = held(gpu.snapshot(), 0, {start + 512: "param", start: "batch"}, [])
    assert one.kind == "param"


class Cache:
    layers: list[object]


def test_models_and_optimizers_are_known_by_where_their_storages_lie():
    """Real tensors of torch; blocks of the snapshot lie where these lie."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    layers = Layers()
    layers.meet(model)
    layers.parts("optimizer_state", optimizer)
    cache = Cache()
    cache.layers = [(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))]
    layers.parts("kv_cache", cache)
    lives, here = Lives(lambda *_: None, lambda: here), Frame("rollout", "stage")
    seen, again = torch.zeros(100), model[0].weight
    for tensor in (seen, again):
        lives.see(tensor, "advantages", "write", here, 0)
    parameters = list(model.parameters())
    real = [
        *parameters, *model.buffers(), *(p.grad for p in parameters),
        *(value for state in optimizer.state.values() for value in state.values()), *cache.layers[0], seen,
    ]  # fmt: skip
    gpu = Gpu()
    for tensor in real:
        gpu.allocator.take(tensor.nbytes, at=tensor.untyped_storage().data_ptr())
    gpu.allocator.take(GIB)
    memory = DeviceMemory(lambda work, *args: work(*args), InUse(gpu.find))
    shortages = OutOfMemory(
        lambda *_: None, memory, lambda: addresses(layers, lives), lambda work, *args: work(*args), history=1, who=""
    )
    sums: dict[str, int] = {}
    for one in shortages._blocks(gpu, 0):
        sums[one.kind] = sums.get(one.kind, 0) + one.bytes
    weights = 4 * (64 * 32 + 32 + 32 + 32)
    assert sums == {
        "param": weights + 4 * (32 + 32) + 8,  # running mean and variance, and the number of batches
        "grad": weights,
        "optimizer": 2 * weights + 4 * len(parameters),  # moments, and a step counter each
        "kv_cache": 2 * 4 * 24,
        "batch": 400,  # and the weight that a probe knows by another name stays a parameter
        "temporary": GIB,
    }


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.booleans(), st.integers(0, 9)), max_size=30),
    st.lists(st.integers(0, 9), max_size=5),
    st.integers(0, 1),
)
def test_whatever_is_known_the_kinds_add_up_to_what_is_allocated(blocks, marks, device):
    gpu = Gpu(devices=2)
    known = {}
    for number, (size, stays, time_us) in enumerate(blocks):
        address = gpu.allocator.take(size, device=number % 2, time_us=time_us)
        known |= {address + size // 2: "param"} if number % 3 == 0 else {}
        if not stays:
            gpu.allocator.give_back(address, device=number % 2)
    found = held(gpu.snapshot(), device, known, [Moment(at, "rollout") for at in sorted(marks)])
    assert sum(one.bytes for one in found) == gpu.stats(device)["allocated_bytes"]["all"]["current"]
    assert sum(one.bytes for one in found if one.kind == "param") == sum(
        size for number, (size, stays, _) in enumerate(blocks) if number % 3 == 0 and stays and number % 2 == device
    )


# ---------------------------------------------------------------- rows and finding


def test_without_a_history_the_finding_has_what_the_error_and_the_allocator_say(gpu, job):
    gone = gpu.allocator.take(4 * GIB)
    gpu.allocator.take(12 * GIB)
    gpu.allocator.give_back(gone)
    job.update, job.forward = lambda: job.forward(), runs_out
    rows = recorded(lambda: job.step(), rank=1, rank_count=2)
    (found,) = rows.of("findings", id="out_of_memory")
    assert (found.stage, found.phase, found.step, found.verdict, found.evidence) == (
        "update_actor", "forward", 0, "fail", None
    )  # fmt: skip
    assert found.message == (
        "rank 1: update_actor/forward ran out of GPU memory: 3.15 GiB more were asked for, 6.80 GiB of 39.56 GiB were free; "
        "allocated 12.00 GiB of 16.00 GiB reserved (fragmentation 25.0%); highest peak 12.00 GiB in update_actor, step 0"
    )
    assert found.next_step.startswith("enough was reserved and free, but in pieces")  # 4 GiB of 3.15
    (total,) = rows.of("memory", instant="oom")
    assert (total.kind, total.allocated, total.reserved, total.fragmentation) == ("total", 12 * GIB, 16 * GIB, 0.25)
    assert (total.peak_since_stage, total.reserved_peak_since_stage) == (12 * GIB, 16 * GIB)
    assert gpu.history == []
    assert len(rows.of("findings", id="call_failed")) == 1
    assert not rows.of("findings", id="recorder_error")


def test_with_a_history_every_block_has_a_kind_and_a_stage(gpu, job, monkeypatch):
    clock = iter(range(10**9, 10**12, 10**9))  # a second for every look
    monkeypatch.setattr("flowledger.record.gpu.out_of_memory.time.time_ns", lambda: seconds[0])
    seconds = [1000]

    def at():
        seconds[0] = next(clock)
        return seconds[0] // 1000

    take = gpu.allocator.take
    take(8 * GIB, time_us=0, frames=frames("model.py:load"))  # before the recording

    def rollout():
        take(20 * GIB, time_us=at() + 1, frames=frames(SITE + "vllm/v1/worker/utils.py:allocate_kv_cache"))
        gpu.allocator.give_back(take(50 * GIB, time_us=at() + 1))
        gpu.allocator.empty_cache()
        at()

    def forward():
        for _ in range(3):
            take(5 * GIB, time_us=at() + 1, frames=frames(*FORWARD))
        runs_out()

    def between():
        take(GIB, time_us=at() + 1, frames=frames("model.py:between"))
        at()

    job.rollout, job.update, job.forward = rollout, lambda: (at(), job.forward()), forward
    job.step = lambda: (job.rollout(), between(), job.update())
    rows = recorded(lambda: job.step(), memory_history=1000)
    assert not rows.of("findings", id="recorder_error")
    assert gpu.history == [1000, None]
    here = {row.kind: row.allocated for row in rows.of("memory", instant="oom", stage="update_actor")}
    assert here == {"total": 44 * GIB, "kv_cache": 20 * GIB, "activation": 15 * GIB, "temporary": 9 * GIB}
    made = {(row.stage, row.kind): row.allocated for row in rows.of("memory", instant="made")}
    assert made == {("rollout", "kv_cache"): 20 * GIB, ("update_actor", "activation"): 15 * GIB}
    assert {row.step for row in rows.of("memory", instant="made")} == {0}
    (found,) = rows.of("findings", id="out_of_memory")
    assert found.message.endswith(
        "; most of it kv_cache 20.00 GiB, activation 15.00 GiB, temporary 9.00 GiB; highest peak 78.00 GiB in rollout, step 0"
    )
    assert found.evidence == [
        "20.00 GiB kv_cache in 1 block, made in rollout, worker/utils.py:7 allocate_kv_cache",
        "15.00 GiB activation in 3 blocks, made in update_actor, qwen2/modeling_qwen2.py:7 forward",
        "8.00 GiB temporary in 1 block, model.py:7 load",
        "1.00 GiB temporary in 1 block, model.py:7 between",
    ]


def test_a_history_that_the_job_keeps_is_used_and_left_alone(gpu, job):
    gpu.others_history = True
    gpu.allocator.take(GIB, frames=frames(*FORWARD))
    job.update = runs_out
    rows = recorded(lambda: job.update(), memory_history=1000)
    assert gpu.history == []
    assert rows.of("findings", id="out_of_memory")[0].evidence == [
        "1.00 GiB activation in 1 block, qwen2/modeling_qwen2.py:7 forward"
    ]


def test_another_process_that_holds_what_is_lacking_is_named(gpu, job):
    gpu.allocator.take(30 * GIB)
    job.update = lambda: runs_out(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is free. "
        "Process 77 has 48.00 GiB memory in use. Including non-PyTorch memory, this process has 31.00 GiB memory in use."
    )
    (found,) = recorded(lambda: job.update()).of("findings", id="out_of_memory")
    assert found.next_step == "other processes hold 48.00 GiB of the device: is an engine that shares it awake?"


def test_one_shortage_is_told_once_however_many_calls_it_leaves_and_a_second_again(gpu, job):
    gpu.allocator.take(GIB)
    job.update, job.forward = lambda: job.forward(), runs_out

    def tries_again():
        for _ in range(5):
            try:
                job.update()
            except torch.OutOfMemoryError:
                continue

    rows = recorded(tries_again)
    assert len(rows.of("findings", id="out_of_memory")) == 3  # and no more: enough is said


def test_a_process_without_a_gpu_that_hears_of_anothers_shortage_says_nothing(gpu, job):
    job.update = runs_out  # as a Ray task raises it again in the driver
    rows = recorded(lambda: job.update(), memory_history=1000)
    assert not rows.of("findings", id="out_of_memory")
    assert gpu.history == []


def test_a_snapshot_that_fails_costs_the_kinds_and_not_the_finding(gpu, job):
    gpu.allocator.take(GIB)
    gpu.snapshot = lambda: {"segments": [{}]}
    job.update = runs_out
    rows = recorded(lambda: job.update(), memory_history=1000)
    assert [row.id for row in rows.of("findings")] == ["recorder_error", "out_of_memory", "call_failed"]
    assert [row.kind for row in rows.of("memory", instant="oom")] == ["total"]


def test_the_history_is_asked_for_by_the_environment(monkeypatch):
    monkeypatch.setenv("FLOWLEDGER_RUN", "run")
    assert asked().memory_history == 0
    monkeypatch.setenv("FLOWLEDGER_MEMORY_HISTORY", "100000")
    assert asked().memory_history == 100_000
    monkeypatch.setenv("FLOWLEDGER_MEMORY_HISTORY", "yes")
    with pytest.raises(BadInput, match=r"FLOWLEDGER_MEMORY_HISTORY = 'yes' must be a whole number"):
        asked()
