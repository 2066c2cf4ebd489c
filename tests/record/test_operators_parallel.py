"""The operators' watch on real ranks: live bytes agree with torch's own profiler, and each storage has its kind (law 5)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from flowledger.config.schema import RunConfig
from flowledger.record import sampled
from flowledger.record.adapters import collectives
from flowledger.record.adapters.loop import PROBES
from flowledger.record.attach import attach
from flowledger.record.operators import Operators
from flowledger.record.position import Frame
from flowledger.record.recorder import Recorder
from flowledger.run import loop
from tests.run import worlds

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PLAIN = {Tensor, torch.nn.Parameter}
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp": ({"dp": 2}, {}),
    "tp, sequence parallel": ({"tp": 2}, {"engine": {"sequence_parallel": True}}),
}


class Lingering(TorchDispatchMode):
    """Waits a moment after each collective, so that its tensors mostly outlive gloo's own references to them.

    The profiler does not see what gloo's threads give back.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and FakeTensor not in types and not PLAIN.issuperset(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if "wait_tensor" in func.name():
            time.sleep(5e-4)
        return result


@contextmanager
def lingering() -> Iterator[None]:
    original = dist.Work.wait

    def wait(work: Any, *args: Any) -> Any:
        result = original(work, *args)
        time.sleep(5e-4)
        return result

    with pytest.MonkeyPatch.context() as patch, Lingering():
        patch.setattr(dist.Work, "wait", wait)
        yield


def profiled_peak(audit: Any) -> tuple[int, int]:
    """The highest running sum of what the allocator handed out: without and with what was not seen to come back.

    They are equal where all of it was seen. An address that is handed out again had come back.
    """
    waiting, found = list(audit.profiler.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr))
    changes: list[int] = []
    born: dict[int, int] = {}  # address -> which of the changes
    lost: list[int] = []
    for _, size, address in sorted(found):
        if size > 0:
            lost += [born[address]] if address in born else []
            born[address] = len(changes)
        else:
            born.pop(address, None)
        changes.append(size)
    lost += born.values()
    seen = [0 if place in set(lost) else size for place, size in enumerate(changes)]
    return max(accumulate(seen)), max(accumulate(changes))


class Kinds:
    """Bytes by kind at the peak of each stage of the second step."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, int]] = {}

    def put(self, row: Any) -> None:
        if getattr(row, "instant", None) == "peak" and row.step == 1 and row.stage:
            self.of.setdefault(row.stage, {})[row.kind] = row.allocated


def audited(config: RunConfig) -> tuple[list[tuple[int, int, int]], dict[str, dict[str, int]], int]:
    """Of each step its peak by the watch, and by the profiler at least and at most; kinds; bytes of the parameters here."""
    grown: list[int] = []
    write = sampled.SampledStep.write

    def noting(step: sampled.SampledStep) -> None:
        grown.append(step.mode.peak_growth)
        write(step)

    sampled.SampledStep.write = noting  # type: ignore[method-assign]  # this process ends with the test
    kinds, truths = Kinds(), list[tuple[int, int]]()
    with loop.prepared(config) as world:
        recorder = Recorder(kinds, level="tensors", bindings=world.bindings, ops_every=1)
        with attach((*PROBES, *collectives.PROBES), recorder), lingering():
            loop.rl_step(step=0, world=world)  # the optimizer makes its states
            for step in range(1, config.steps):
                with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as audit:
                    loop.rl_step(step=step, world=world)
                truths.append(profiled_peak(audit))
        here = [p.to_local() if isinstance(p, DTensor) else p for p in world.policy.model.parameters()]
        held = sum(p.nbytes for p in (*here, *world.weights.model.parameters()))
    return [(watched, *truth) for watched, truth in zip(grown[1:], truths, strict=True)], kinds.of, held


@pytest.mark.parametrize("name", MESHES)
def test_the_peak_of_a_step_is_the_profilers_to_64_bytes_on_each_rank(name: str, forked: ModuleType) -> None:
    mesh, actor = MESHES[name]
    config = worlds.config(
        steps=3, data={"prompts_per_step": 2}, rollout={"samples_per_prompt": 4, "max_response_tokens": 4}, mesh=mesh,
        actor={"mini_batch_prompts": 2, "micro_batch": {"samples": 4}, **actor},
    )  # fmt: skip
    for steps, kinds, parameters in forked.ranks(2, audited, config):
        for watched, least, most in steps:
            assert least > 50_000 and most < 1.2 * least
            assert least - 64 <= watched <= most + 64
        update = kinds["update_actor"]
        assert (
            0 <= update["param"] - parameters < 300
        )  # rotation tables of two models; gathered copies are no part of it
        assert update["comm_buffer"] > 0


def test_a_parameter_that_is_put_together_and_emptied_again_is_a_buffer() -> None:
    gathered = torch.empty(1000)
    gathered.untyped_storage().resize_(0)
    watch = Operators(Frame("step", "step"))
    with watch.watching():
        gathered.untyped_storage().resize_(4000)
        gathered.zero_()
        gathered.untyped_storage().resize_(0)
    assert [(born.began, change) for born, change, _ in watch._events] == [(0, 4000), (0, -4000)]
    assert {sign for born, _, _ in watch._events for sign in born.signs} == {"collective"}
