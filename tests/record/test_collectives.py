"""Collectives of real ranks: each is recorded once, with the bytes that a dispatch mode and arithmetic by hand find."""

import importlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from stage_functions import Model
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowledger.flow.seams import Probe, locate
from flowledger.record.adapters import collectives, loop
from flowledger.record.attach import attach
from flowledger.record.process_groups import ranks_text
from flowledger.record.recorder import Recorder
from flowledger.run.loop import prepared, train
from flowledger.run.models import load_policy
from flowledger.run.parallel.collectives import told
from tests.run import worlds

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CONFIG = worlds.config(
    data={"prompts_per_step": 2}, rollout={"samples_per_prompt": 4}, mesh={"dp": 2},
    actor={"mini_batch_prompts": 2, "micro_batch": {"samples": 2}},
)  # fmt: skip


class Rows(list[Any]):
    def put(self, row: Any) -> None:
        self.append(row)

    def spans(self, kind: str = "comm", **where: Any) -> list[Any]:
        """Those that have ended."""
        found = [row for row in self if row.table == "spans" and row.span_kind == kind and row.end_ns is not None]
        return [row for row in found if all(getattr(row, name) == value for name, value in where.items())]


@contextmanager
def recorded(probes: Any = (*loop.PROBES, *collectives.PROBES), **options: Any) -> Iterator[tuple[Rows, Recorder]]:
    rows = Rows()
    options = {"level": "tensors", "rank": dist.get_rank(), "rank_count": 2, "ops_every": 0} | options
    recorder = Recorder(rows, **options)
    with attach(probes, recorder):
        yield rows, recorder
    assert recorder.cost()["errors"] == 0, [row for row in rows if row.table == "findings"]


@pytest.fixture(scope="module")
def forked() -> Iterator[ModuleType]:
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("forked")
    patch.undo()


# ---------------------------------------------------------------- a step of the loop


KINDS = {
    "allreduce_": "all_reduce", "allgather_": "all_gather", "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "alltoall_base_": "all_to_all", "all_gather_into_tensor": "all_gather",
}  # fmt: skip


class Witness(TorchDispatchMode):
    """(kind, bytes) of every collective that torch dispatches; where nothing says more, of the largest tensors in it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            kind = KINDS[name]
            sides = [[x for x in tree_leaves(value) if isinstance(x, torch.Tensor)] for value in (*args, result)]
            sizes = [sum(x.nbytes for x in side) for side in sides]
            self.seen.append((kind, sizes[1] if kind == "all_to_all" else max(sizes)))
        return result


def one_step() -> tuple[Rows, list[tuple[str, int]]]:
    with prepared(CONFIG) as world, recorded(axes={(0, 1): "dp"}) as (rows, _), Witness() as witness:
        list(train(world))
        told("any object", world.ranks.group("dp"))
    return rows, witness.seen


@pytest.fixture(scope="module")
def step(forked: ModuleType) -> list[tuple[Rows, list[tuple[str, int]]]]:
    """What each of two ranks recorded of one step, and what the witness saw."""
    return forked.ranks(2, one_step)  # type: ignore[no-any-return]  # a module found at run time


def test_each_collective_is_a_span_once_with_its_bytes(step: Any) -> None:
    for rows, seen in step:
        spans = rows.spans()
        objects = [(row.comm_type, row.bytes) for row in spans if row.comm_type == "all_gather_object"]
        plain = [(row.comm_type, row.bytes) for row in spans if row.comm_type != "all_gather_object"]
        left = Counter(seen) - Counter(plain)
        assert not Counter(plain) - Counter(seen)
        assert sum(left.values()) == 2 * len(objects) > 0  # lengths, then the objects
        assert sum(size * count for (_, size), count in left.items()) == sum(size for _, size in objects)


def test_the_bytes_of_fsdp_are_those_of_padded_parameters(step: Any) -> None:
    model = load_policy(CONFIG.model, seed=0).model
    units: dict[str, int] = {}
    for name, weight in model.named_parameters():
        unit = name[: name.index(".", len("model.layers."))] if name.startswith("model.layers.") else ""
        rows = 2 * -(-weight.shape[0] // 2)  # each rank holds as many rows of the first dimension
        units[unit] = units.get(unit, 0) + rows * weight[0].numel() * 4
    assert len(units) == 3
    once = sorted(units.values())
    for rows, _ in step:
        for micro_batch in range(2):
            at = {"stage": "update_actor", "mini_batch": 0, "micro_batch": micro_batch}
            for kind, phase in (("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward")):
                spans = rows.spans(comm_type=kind, phase=phase, **at)
                assert sorted(row.bytes for row in spans) == once, (kind, phase)


def test_group_peers_and_place_stand_in_every_span(step: Any) -> None:
    for rank, (rows, _) in enumerate(step):
        spans = rows.spans()
        assert {(row.group, tuple(row.peer_ranks), row.rank, row.rank_count) for row in spans} == {
            ("dp", (0, 1), rank, 2)
        }
        assert {"rollout", "balance", "advantage", "update_actor", "weight_sync"} <= {row.stage for row in spans}
        assert all(row.end_ns >= row.start_ns for row in spans)
        within = [row for row in spans if row.stage]  # the last one comes after the step
        known = {row.id for row in rows if row.table == "spans"}
        assert within and all(row.step == 0 and row.parent in known for row in within)


def test_what_is_gathered_has_a_row_as_a_buffer(step: Any) -> None:
    for rows, _ in step:
        forward = {row.bytes for row in rows.spans(stage="update_actor", phase="forward", comm_type="all_gather")}
        buffers = [row for row in rows if row.table == "tensors" and row.tensor_name == "comm_buffer"]
        shown = {row.bytes for row in buffers if (row.stage, row.phase) == ("update_actor", "forward")}
        assert shown == forward
        assert {row.kind for row in buffers} == {"comm_buffer"}
        made = {row.storage for row in buffers}
        freed = {row.storage for row in rows if row.table == "storages" and row.event == "freed"}
        assert made <= freed


# ---------------------------------------------------------------- every function


def calls(rank: int) -> list[tuple[Callable[[], Any], tuple[str, int, list[int]]]]:
    """Functions of torch on two ranks, and (kind, bytes, peers) by hand. x is 24 bytes on each rank."""
    x, other, both = torch.arange(6, dtype=torch.float32), 1 - rank, [0, 1]
    world = dist.group.WORLD
    twice = torch.zeros(12)

    def swap() -> None:
        ops = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.zeros(6), other)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def backward() -> None:
        start = x.clone().requires_grad_()
        functional.all_gather_single(start, 0, world).sum().backward()

    return [
        (lambda: dist.all_reduce(x.clone()), ("all_reduce", 24, both)),
        (lambda: dist.all_reduce(x.clone(), async_op=True).wait(), ("all_reduce", 24, both)),
        (lambda: dist.all_gather([torch.zeros(6), torch.zeros(6)], x), ("all_gather", 48, both)),
        (lambda: dist.all_gather_single(twice, x), ("all_gather", 48, both)),
        (lambda: dist.reduce_scatter_single(torch.zeros(3), x.clone()), ("reduce_scatter", 24, both)),
        (lambda: dist.all_to_all_single(torch.zeros(6), x), ("all_to_all", 24, both)),
        (lambda: dist.broadcast(x.clone(), src=0), ("broadcast", 24, both)),
        (lambda: dist.reduce(x.clone(), dst=0), ("reduce", 24, both)),
        (lambda: dist.gather(x, [torch.zeros(6), torch.zeros(6)] if rank == 0 else None), ("gather", 48, both)),
        (lambda: dist.scatter(torch.zeros(6), [x, x] if rank == 0 else None), ("scatter", 48, both)),
        (lambda: dist.barrier(), ("barrier", 0, both)),
        (lambda: dist.send(x, 1) if rank == 0 else dist.recv(torch.zeros(6), 0), (("send", "recv")[rank], 24, [other])),
        (swap, ("send", 24, [other])),
        (lambda: None, ("recv", 24, [other])),  # of swap
        (lambda: functional.all_reduce(x, "sum", world) + 1, ("all_reduce", 24, both)),
        (lambda: functional.reduce_scatter_single(x, "sum", 0, world) + 1, ("reduce_scatter", 24, both)),
        (lambda: functional.all_to_all_single(x, None, None, world) + 1, ("all_to_all", 24, both)),
        (backward, ("all_gather", 48, both)),
        (lambda: None, ("reduce_scatter", 48, both)),  # of backward
    ]


def every_function() -> tuple[Rows, list[tuple[str, int, list[int]]]]:
    table = calls(dist.get_rank())
    with recorded() as (rows, recorder):
        for call, _ in table:
            call()
        assert recorder.open_spans() == []
    dist.barrier()
    return rows, [expected for _, expected in table]


def test_every_function_of_torch_is_seen_once(forked: ModuleType) -> None:
    for rows, expected in forked.ranks(2, every_function):
        spans = sorted(rows.spans(), key=lambda row: row.id)
        assert [(row.comm_type, row.bytes, row.peer_ranks) for row in spans] == expected
        assert {row.group for row in spans} == {"0-1"}  # no axis has been named
        waits = [row.name for row in rows.spans("wait")]
        assert waits.count("wait all_reduce") == 1  # of the functional one, by the operator's name
        assert waits.count("wait allreduce") == 1 and waits.count("wait send") >= 1


def objects_and_failures() -> tuple[Rows, int]:
    rank = dist.get_rank()
    single = [dist.new_group([0]), dist.new_group([1])][rank]
    with recorded() as (rows, recorder):
        said: list[Any] = [None, None]
        dist.all_gather_object(said, "x" * (100 + rank))
        with pytest.raises(TypeError, match="incompatible function arguments"):
            dist.group.WORLD.allreduce("no tensors")
        dist.all_reduce(torch.ones(1), group=single)
        assert recorder.open_spans() == []
    return rows, len(dist.distributed_c10d._object_to_tensor("x" * 101, torch.device("cpu"), None)[0])


def test_objects_count_as_one_and_a_failing_call_ends(forked: ModuleType) -> None:
    for rank, (rows, pickled) in enumerate(forked.ranks(2, objects_and_failures)):
        first, failed, alone = rows.spans()
        assert (first.comm_type, first.bytes, first.peer_ranks) == ("all_gather_object", 2 * 8 + 2 * pickled, [0, 1])
        assert failed.comm_type == "all_reduce" and failed.end_ns is not None
        assert (alone.group, alone.peer_ranks) == (str(rank), [rank])


def pipelined() -> Rows:
    """Three micro-batches [2, 4] through two layers, one on each rank."""
    rank = dist.get_rank()
    stage = PipelineStage(torch.nn.Linear(4, 4), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 3, loss_fn=lambda out, target: (out - target).sum())
    with recorded(probes=collectives.PROBES) as (rows, _):
        schedule.step(*([torch.ones(6, 4)] if rank == 0 else []), **({"target": torch.ones(6, 4)} if rank == 1 else {}))
    return rows


def test_what_a_pipeline_sends_belongs_to_its_micro_batch(forked: ModuleType) -> None:
    there, back = forked.ranks(2, pipelined)
    for rows, forward, backward in ((there, "send", "recv"), (back, "recv", "send")):
        for kind, phase in ((forward, "forward"), (backward, "backward")):
            travelled = [(row.micro_batch, row.bytes) for row in rows.spans(comm_type=kind, phase=phase)]
            assert travelled == [(0, 32), (1, 32), (2, 32)], (kind, phase)


# ---------------------------------------------------------------- time


def late() -> tuple[Rows, list[Any]]:
    """Rank 1 comes 1.5 s late to the first; rank 0 waits for the second 0.5 s after it was done."""
    rank, seen = dist.get_rank(), []
    with recorded(axes={(0, 1): "dp"}) as (rows, recorder):
        look = threading.Timer(0.4, lambda: seen.extend(recorder.open_spans()))
        look.start()
        if rank == 1:
            time.sleep(2.5)
        dist.all_reduce(torch.ones(2))
        work = dist.all_reduce(torch.ones(3), async_op=True)
        time.sleep(0.6)
        work.wait()
        look.join()
    return rows, seen


def test_what_is_open_can_be_seen_and_is_written_before_it_ends(forked: ModuleType) -> None:
    (rows, seen), _ = forked.ranks(2, late)
    (waiting,) = seen  # another thread saw it while its caller stood still
    assert (waiting.event, waiting.group, waiting.peer_ranks, waiting.bytes) == ("begin", "dp", [0, 1], 8)
    begin, end = [row for row in rows if row.table == "spans" and row.bytes == 8]
    assert (begin.event, end.event, begin.id, begin.start_ns) == ("begin", "end", end.id, end.start_ns)
    assert begin.end_ns is None and end.latency_ms > 1000
    (work,), (wait,) = rows.spans(bytes=12), rows.spans("wait")
    assert work.latency_ms < 550 and wait.start_ns - work.start_ns > 550e6  # done long before its caller asked


# ---------------------------------------------------------------- without ranks


def test_all_targets_are_there() -> None:
    for probe in collectives.PROBES:
        assert callable(locate(probe.target)[2]), probe.target


@pytest.mark.parametrize(
    ("ranks", "text"), [([0, 1, 2, 3], "0-3"), ([0, 2], "0,2"), ([5], "5"), ([4, 5], "4-5"), ([1, 0], "1,0")]
)
def test_ranks_are_written_short(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_a_call_that_knows_its_micro_batch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "turn", lambda self, number: number, raising=False)
    probe = Probe(stage=None, target="stage_functions:Model.turn", scope="micro_batch", args={"number": "@micro_batch"})
    rows = Rows()
    with attach((probe,), Recorder(rows, level="steps")):
        for number in (2, 0, 1):
            Model().turn(number)
    assert [row.micro_batch for row in rows.spans("compute")] == [2, 0, 1]
