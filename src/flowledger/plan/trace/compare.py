"""The second depth: the model's own code under FakeTensor, every storage tracked, beside the closed form.

Nothing is allocated and nothing computed, so a 70 B model on 64 ranks is traced on a laptop. It covers Hugging Face
decoders on one device, under DDP, FSDP2 and TP; Megatron's own modules and other people's kernels are not run here.
"""

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from flowledger.flow.errors import BadInput
from flowledger.plan.fsdp import timeline as fsdp
from flowledger.plan.fsdp.symbols import is_packed_loop
from flowledger.plan.job import Job
from flowledger.plan.logits import implementation, logits_lives
from flowledger.plan.plan import Plan
from flowledger.plan.timeline import Clock, Timeline
from flowledger.plan.trace.loss import CHUNKED, FOREIGN, Loss
from flowledger.plan.trace.model import LossHead, build, fake_world
from flowledger.plan.trace.reach import refuse
from flowledger.plan.trace.storages import Storages

AGREES = 0.02  # closed form and trace within this: neither is in doubt


@dataclass(frozen=True, slots=True)
class Traced:
    """The fullest moment of one stage: bytes by kind, and in which phase it fell."""

    stage: str
    phase: str
    kinds: dict[str, int]
    seconds: float

    @property
    def bytes(self) -> int:
        return sum(self.kinds.values())


def compare_with(plan: Plan, config_path: str | None = None) -> list[dict[str, Any]]:
    """Each stage in which the actor computes: traced peak, closed form, and whether the two agree within 2 %.

    `config_path`: a config.json or its directory, of a model that no catalogue knows. Where the loss is a kernel that
    no trace runs, `agrees` is null, `reason` says so, and both sides are those without logits. Raises BadInput for a
    plan that no trace covers.
    """
    rows = []
    for (stage, ranks), (work, job) in plan.jobs.items():
        if work.role != "actor" or ranks != plan.classes[0].name:
            continue
        traced, planned = trace(job, stage, config_path), closed(job)
        gap, reason = planned / traced.bytes - 1, FOREIGN.get(implementation(job), "")
        rows.append(
            {
                "stage": stage,
                "phase": traced.phase,
                **traced.kinds,
                "traced": traced.bytes,
                "planned": planned,
                "deviation": gap,
                "agrees": None if reason else abs(gap) <= AGREES,
                "reason": reason,
                "seconds": traced.seconds,
            }
        )
    return rows


def closed(job: Job) -> int:
    """Peak of the closed form; without its logits where a trace has none."""
    full = fsdp.timeline(job)
    if implementation(job) not in FOREIGN:
        return full.peak().bytes
    made = {live.label for live in logits_lives(job, 1 << 20, 1 << 20, Clock())}
    return Timeline(full.instants, tuple(live for live in full.lives if live.label not in made)).peak().bytes


def trace(job: Job, stage: str, config_path: str | None = None) -> Traced:
    """Run one optimizer step (or one micro-batch without gradients) in which the states exist. Raises BadInput."""
    refuse(job)
    began = time.monotonic()
    name = config_path or job.architecture.name
    with _silence(), _told(name), fake_world(job.world) as fake, fake, Storages().watching() as storages:
        run(build(job, config_path), job, storages)
    kinds = {kind: size for kind, size in storages.peak.items() if size}
    return Traced(stage, storages.at, kinds, time.monotonic() - began)


def run(model: nn.Module, job: Job, storages: Storages) -> None:
    """The stage on a model that is built, fake or real, under a tracker that watches."""
    for tensor in (*model.parameters(), *model.buffers()):
        storages.see(tensor, "parameter")
    micro_batch = MicroBatch(model, job)
    if job.gradients:
        _train(model, job, storages, micro_batch)
    else:
        storages.phase = "forward"
        storages.begin()
        with torch.no_grad():
            micro_batch.forward()


def _train(model: nn.Module, job: Job, storages: Storages, micro_batch: "MicroBatch") -> None:
    buckets = _buckets(model, job, storages)
    optimizer = _optimizer(model, job, storages)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # torch leaves it untyped
            lambda p: storages.see(p.grad, "gradient") if p.grad is not None else None
        )
    whole = job.engine.accumulates_unsharded and job.engine.strategy == "fsdp2" and job.micro_batches > 1
    if job.micro_batches > 1 and not whole:  # what earlier micro-batches left
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
            storages.see(parameter.grad, "gradient")
    storages.begin()
    for last in [False, True] if whole else [True]:
        if job.engine.strategy == "fsdp2":
            model.set_requires_gradient_sync(last)  # type: ignore[operator]  # FSDPModule has it
        storages.phase = "forward"
        with _saving(storages):
            loss = micro_batch.forward().sum()
        storages.phase = "backward"
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        del loss
        micro_batch.forget()
    storages.phase = "step"
    for own, parameter in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True):
        own.grad = None if parameter.grad is None else _local(parameter.grad)
    optimizer.step()
    model.zero_grad(set_to_none=True)
    del buckets


def _optimizer(model: nn.Module, job: Job, storages: Storages) -> torch.optim.Optimizer:
    """An optimizer with the states of a first step (torch/optim/adam.py `_init_group`).

    It steps this rank's shards themselves: DTensor would do the same to them, and take minutes to find out how.
    """
    how = job.engine.optimizer.implementation
    foreach = how == "foreach" and job.device is not None  # torch takes it on accelerators only
    held = [nn.Parameter(_local(one.detach())) for one in model.parameters()]
    optimizer = torch.optim.AdamW(held, lr=1e-6, foreach=foreach, fused=how == "fused" or None)
    for parameter in held:
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                storages.see(value, "optimizer_state")
    return optimizer


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor."""
    return getattr(tensor, "_local_tensor", tensor)


def _buckets(model: nn.Module, job: Job, storages: Storages) -> Tensor | None:
    """DDP's reducer, which runs on real tensors only, holds every gradient a second time."""
    if job.engine.strategy != "ddp":
        return None
    held = [one for one in model.parameters() if one.requires_grad]
    buckets = torch.empty(sum(one.numel() for one in held), dtype=held[0].dtype)
    storages.see(buckets, "collective")
    return buckets


@contextmanager
def _saving(storages: Storages) -> Iterator[None]:
    """What forward saves for backward is learnt where autograd packs it."""

    def pack(value: Tensor) -> Tensor:
        storages.see(value, "saved_for_backward")
        return value

    with saved_tensors_hooks(pack, lambda value: value):
        yield


class MicroBatch:
    """One packed row [1, T] through model and loss."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        self.model, self.job = model, job
        causal: Any = model
        self.loss = Loss(job, -(-causal.config.get_text_config().vocab_size // job.mesh.tp))
        self.ids = torch.zeros(1, job.tokens, dtype=torch.int64)
        self.positions = torch.arange(job.tokens)[None]
        if self.loss.how in (*CHUNKED, *FOREIGN):
            causal.set_output_embeddings(LossHead(causal.get_output_embeddings(), self.loss))

    def forward(self) -> Tensor:
        """Log-probs of the tokens, [T] (of a loss that no trace runs: hidden states)."""
        rows: Any = min(self.job.logit_tokens or self.job.tokens, self.job.tokens)
        if self.loss.how.startswith("own") and rows < self.job.tokens:
            rows = torch.arange(rows)  # it picks rows, which copies them; others take the last ones, which does not
        inputs = {"input_ids": self.ids, "position_ids": self.positions, "logits_to_keep": rows}
        more = {"job": self.job} if is_packed_loop(self.job.engine) else {}
        found: Tensor = self.model(**inputs, **more, return_dict=False)[0]
        if self.loss.how in (*CHUNKED, *FOREIGN):
            return found
        box = [found.squeeze(0)]
        del found
        return self.loss.from_logits(box)

    def forget(self) -> None:
        """The micro-batch ends: its names go."""
        self.loss.held.clear()


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Whatever a model's code cannot do without numbers, or under tp and FSDP2, becomes one line."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise BadInput(f"--trace: the code of {name} does not run under FakeTensor: {lines[0].strip()}") from error


@contextmanager
def _silence() -> Iterator[None]:
    """Of what a real run warns about, nothing concerns a trace."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
