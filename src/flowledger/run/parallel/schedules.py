"""Micro-batches on their way through a model: one after another, or in the order of a pipeline's schedule.

Torch's schedules (GPipe: Huang et al. 2018, arXiv 1811.06965; 1F1B and interleaved: Narayanan et al. 2021, arXiv
2104.04473) say what a stage does next; what it does is here. Between two stages all micro-batches of a call have the
same shape [N, H]: N are the most tokens that one of them has, shorter ones are filled with zeros that nobody reads.
Every rank of `pp` has the same samples: only hidden states and their gradients travel.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn.functional import pad

from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput
from flowledger.run import forward
from flowledger.run.batching import Indices
from flowledger.run.parallel import collectives, pipeline, sharded
from flowledger.run.parallel.pipeline import Passing, Pipeline, shown
from flowledger.run.parallel.ranks import Ranks
from flowledger.run.parallel.rows import Columns, packed, unpacked

Work = Callable[[Indices], Tensor | None]  # one micro-batch, given its samples; its loss [] where it has one

SEQUENCES = ("full_sequence", "attention_mask", "position_ids", "response_mask")

logging.getLogger(torch_schedules.__name__).setLevel(logging.CRITICAL)  # what it would log is raised as well


def each(
    work: Work,
    micro_batches: Sequence[Indices],
    *,
    model: nn.Module,
    config: RunConfig,
    ranks: Ranks,
    columns: Columns,
    learns: bool = False,
) -> None:
    """Call `work` with every micro-batch in turn. In a pipeline the last stage does, the others pass hidden states on.

    learns: a gradient is added up. Then `work` does the backward pass itself; in a pipeline it returns the loss, and the
    schedule begins backward when it is its turn. columns: the step's tensors by flow name.
    """
    line = pipeline.of(model)
    if line is None:
        for samples in micro_batches:
            work(samples)
        return
    passes = [
        Pass(samples=samples, sequences=tuple(columns[name][list(samples)] for name in SEQUENCES))
        for samples in _rounds(micro_batches, line)
    ]
    if passes:
        _run(Stages(model=model, line=line, config=config, ranks=ranks, work=work, passes=passes, learns=learns))
    if learns:
        pipeline.add_tied(model=model, line=line)


def from_last(x: Tensor, ranks: Ranks) -> Tensor:
    """The tensor of the last stage, on all stages; x gives shape and dtype on the others."""
    return collectives.sent(x, -1, ranks.group("pp"))


def columns_from_last(columns: Columns, ranks: Ranks) -> dict[str, Tensor]:
    """The same of columns [n, ...] with one row a sample, in one message."""
    if ranks.group("pp").alone or not columns:
        return dict(columns)
    return unpacked(from_last(packed(columns), ranks), columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One micro-batch: its samples, and what every stage knows of it."""

    samples: Indices
    sequences: tuple[Tensor, ...]  # those of SEQUENCES


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What this rank does with micro-batches."""

    model: nn.Module
    line: Pipeline
    config: RunConfig
    ranks: Ranks
    work: Work
    passes: Sequence[Pass]
    learns: bool

    def states(self, model: Any, one: Pass) -> Tensor:
        """Hidden states of one micro-batch from a model, or from what stands for its decoder."""
        actor = self.config.actor
        return forward.response_states(
            model, *one.sequences, packed=actor.packed, shared_prompts=actor.shared_prompts, ranks=self.ranks
        )[0]

    def rows(self) -> int:
        """N: hidden states that the longest micro-batch has between two layers of this rank."""
        looking = Looking(sequence_parallel=self.line.sequence > 1)
        for one in self.passes:
            self.states(looking, one)
        return max(looking.tokens) // self.line.sequence


class Looking:
    """In place of a model: it sees how many tokens enter the decoder, and computes nothing."""

    def __init__(self, *, sequence_parallel: bool) -> None:
        self.sequence_parallel, self.tokens = sequence_parallel, list[int]()

    def get_decoder(self) -> "Looking":
        return self

    def __call__(self, *, input_ids: Tensor, **_: Any) -> tuple[Tensor]:
        self.tokens.append(input_ids.numel())
        return (input_ids[..., None],)


class Stage(nn.Module):
    """One chunk of layers as torch's schedules call it."""

    def __init__(self, stages: Stages, chunk: int, rows: int) -> None:
        super().__init__()
        self.stages, self.chunk, self.rows = stages, chunk, rows

    def forward(self, *received: Tensor, micro_batch: Tensor) -> Tensor:
        return stage_forward(
            stages=self.stages, chunk=self.chunk, micro_batch=int(micro_batch), rows=self.rows,
            hidden_states=received[0] if received else None,
        )  # fmt: skip


class Watched(PipelineStage):
    """Torch's stage, whose backward passes can be watched."""

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if self.has_backward and isinstance(self.submod, Stage):
            backward = partial(super().backward_one_chunk, bwd_chunk_id, *args, **kwargs)
            stage_backward(
                model=self.submod.stages.model, chunk=self.stage_index, micro_batch=bwd_chunk_id, backward=backward
            )


def stage_forward(*, stages: Stages, chunk: int, micro_batch: int, rows: int, hidden_states: Tensor | None) -> Tensor:
    """One micro-batch through one chunk of layers: hidden states [N, H] for the next, or the loss [] where it is the last.

    hidden_states [N, H] are those of the chunk before; None: this is the first.
    """
    model, one, passing = stages.model, stages.passes[micro_batch], Passing(hidden_states)
    with shown(model, stages.line, chunk, passing):
        if chunk == len(stages.line.chunks) - 1:
            loss = stages.work(one.samples)
            return torch.zeros((), device=stages.ranks.device) if loss is None else loss

        def leaving() -> Tensor:
            stages.states(model, one)
            assert passing.left is not None
            left = passing.left.flatten(0, -2)
            return pad(left, (0, 0, 0, rows - len(left)))

        return sharded.within(model, leaving)


def stage_backward(*, model: nn.Module, chunk: int, micro_batch: int, backward: Callable[[], None]) -> None:
    """One micro-batch back through one chunk of layers: its gradient is added to what the mini-batch has so far."""
    backward()


def _run(stages: Stages) -> None:
    line, rows = stages.line, stages.rows()
    between = torch.empty(rows, line.hidden, dtype=line.dtype, device="meta", requires_grad=stages.learns)
    last = len(line.chunks) - 1
    mine = [
        Watched(
            Stage(stages, chunk, rows), chunk, len(line.chunks), stages.ranks.device,
            input_args=() if chunk == 0 else (between,),
            output_args=torch.empty((), device="meta") if chunk == last else between,
            group=line.group.handle,
        )
        for chunk in line.mine
    ]  # fmt: skip
    index = torch.arange(len(stages.passes))
    schedule = _schedule(line, mine, len(index), learns=stages.learns)
    try:
        with torch.set_grad_enabled(stages.learns):
            schedule.step(micro_batch=index, target=index if stages.learns else None, return_outputs=False)
    except RuntimeError as error:
        if isinstance(error.__cause__, BadInput):  # torch has wrapped what a stage raised
            raise error.__cause__ from None
        raise


def _schedule(line: Pipeline, mine: list[Watched], number: int, *, learns: bool) -> Any:
    """The order of so many micro-batches. 1F1B needs as many as there are stages; with fewer GPipe is the same order."""
    loss = (lambda loss, _: loss) if learns else None
    if line.kind == "interleaved":
        return ScheduleInterleaved1F1B(mine, number, loss, scale_grads=False)  # type: ignore[arg-type]  # a list of stages
    one_by_one = line.kind == "1f1b" and learns and number >= line.group.size
    return (Schedule1F1B if one_by_one else ScheduleGPipe)(mine[0], number, loss, scale_grads=False)


def _rounds(micro_batches: Sequence[Indices], line: Pipeline) -> Sequence[Indices]:
    """The micro-batches, and empty ones where the interleaved schedule takes rounds of equally many."""
    number = len(micro_batches)
    while line.kind == "interleaved" and number % max(1, number // line.group.size):
        number += 1
    return [*micro_batches, *[()] * (number - len(micro_batches))]
