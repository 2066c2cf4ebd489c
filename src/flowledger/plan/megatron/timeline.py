"""The memory timeline of one Megatron rank over one optimizer step: any pipeline rank, interleaved or not.

Instants: the forward of the micro-batch at work through its chunk, layer by layer, while the other micro-batches in
flight keep theirs; head and loss on the last rank; backward in reverse; the optimizer. `first_step` is the same without
what only a finished step leaves behind; `resting` what stays between stages.
"""

from dataclasses import replace

from flowledger.plan.job import Job
from flowledger.plan.megatron.allocator import unsplit
from flowledger.plan.megatron.encoder import encoder_lives
from flowledger.plan.megatron.flags import MegatronFlags
from flowledger.plan.megatron.head import final_norm, head_lives, mtp_lives
from flowledger.plan.megatron.layers import backward, checkpoints, halves, layer_bytes, saved, unit
from flowledger.plan.megatron.pipeline import in_flight
from flowledger.plan.megatron.rank import Rank, rank_of
from flowledger.plan.megatron.state import (
    BACKWARD_WORKSPACE,
    KEPT_INPUTS,
    MOMENTS,
    WIDE_GRADS,
    boundary,
    buffers,
    gathered,
    in_segments,
    linear_shapes,
    slack,
    states,
    workspaces,
)  # fmt: skip
from flowledger.plan.saved import Kept
from flowledger.plan.timeline import Clock, Live, Timeline
from flowledger.tables.constants import constant

ALWAYS = MegatronFlags()
ONE = "start of the only micro-batch"
# the row of the activation table that stands for the backward kernels of a linear mixer
TUNED = "gradients of the mixer's projection and output"
END = 10**9


def timeline(job: Job, flags: MegatronFlags = ALWAYS) -> Timeline:
    """One optimizer step of `job.pp_rank` after the first; one micro-batch without gradients where `job.gradients` is off.

    Raises BadInput where layers do not divide among the pipeline stages.
    """
    rank = rank_of(job, flags)
    clock = Clock()
    clock.tick(ONE if job.micro_batches <= 1 else "start")
    work = _training(rank, clock) if job.gradients else _inference(rank, clock)
    held = [_during(live, rank, clock.now) for live in _persistent(rank)]
    return Timeline(tuple(clock.names), (*held, *work))


def _persistent(rank: Rank) -> list[Live]:
    return [live for live in [*states(rank), *workspaces(rank), *buffers(rank), slack(rank)] if live.bytes]


def _during(live: Live, rank: Rank, optimizer: int) -> Live:
    """A persistent tensor as it lies while micro-batches run.

    The float32 copy of fp16 gradients is freed when a step begins. Of the kept pipeline inputs, an interleaved
    schedule has replaced the older half by then.
    """
    if live.label == WIDE_GRADS:
        return replace(live, born=optimizer)
    if live.label == KEPT_INPUTS and len(rank.chunks) > 1:
        return replace(live, bytes=live.bytes // 2)
    return live


def first_step(steady: Timeline, *, resumed: bool = False) -> Timeline:
    """The first step: moments are born in the optimizer, the backward thread's workspace at its first GEMM.

    `resumed`: from a checkpoint, whose moments are there from the start.
    """
    last = len(steady.instants) - 1
    first = next(
        (at for at, name in enumerate(steady.instants) if name.startswith(("head/backward", "backward"))), last
    )
    alone = steady.instants[0] == ONE

    def born(live: Live) -> Live:
        if live.label == MOMENTS and not resumed:
            return replace(live, born=last)
        if live.label == BACKWARD_WORKSPACE and alone:
            return replace(live, born=first)
        return live

    return Timeline(steady.instants, (*(born(live) for live in steady.lives), *_tuned(steady)))


def _tuned(steady: Timeline) -> list[Live]:
    """What Triton clears the cache with while it times the backward kernels of linear mixers, at the first of them.

    The forward kernels are timed when little else is alive.
    """
    at = min((live.born for live in steady.lives if live.label.endswith(TUNED)), default=None)
    if at is None or not any(live.label == BACKWARD_WORKSPACE for live in steady.lives):
        return []
    live = _live("buffer of Triton's autotuning", round(constant("megatron.autotuning")), at, at)
    return [replace(live, name="temporary", kind="residue", source="triton/testing.py do_bench")]


def resting(job: Job) -> tuple[Live, ...]:
    """Parameters, gradients and optimizer states between stages; what is offloaded lies on the host.

    With `offload.param` the gradient buffer goes with the parameters (verl, slime). It is freed and made again as zeros
    (verl utils/megatron_utils.py offload_megatron_model_to_cpu): nothing of it lies on the host.
    """
    offload = job.engine.offload
    away = {"param": offload.param, "optimizer": offload.optimizer}
    dropped = offload.grad or offload.param
    return tuple(
        replace(live, host=live.host or away.get(live.kind, False))
        for live in states(rank_of(job, ALWAYS))
        if not (dropped and live.kind == "grad")
    )


def resident(job: Job, flags: MegatronFlags = ALWAYS) -> list[Live]:
    """Everything that lies on the device between two steps: what `torch.cuda.memory_allocated` shows then."""
    return [live for live in _persistent(rank_of(job, flags)) if not live.host]


def _training(rank: Rank, clock: Clock) -> list[Live]:
    """The micro-batch at work goes through the chunk with the head, then through the heaviest of the others."""
    chunks = range(len(rank.chunks))
    sizes = tuple(layer_bytes(rank, layers) for layers in rank.chunks)
    passes = [len(rank.chunks) - 1] if rank.last else []
    others = [chunk for chunk in chunks if chunk not in passes]
    if others:
        passes.append(max(others, key=lambda chunk: sizes[chunk]))
    found: list[Live] = []
    for chunk in passes:
        found += _pass(rank, chunk, sizes, clock)
    if rank.flags.fsdp:
        found += gathered(rank)
    if rank.flags.attention_mask and (rank.first or rank.last):
        found.append(replace(_live("attention mask", rank.value("mask"), 0, END), kind="batch", name="attention_mask"))
    if rank.flags.encoder_layers:
        found += encoder_lives(rank)
    clock.tick("optimizer")
    last = clock.now - 1  # micro-batches are gone before the optimizer steps
    return [live if live.dies <= last else replace(live, dies=last) for live in found if live.bytes]


def _pass(rank: Rank, chunk: int, sizes: tuple[int, ...], clock: Clock) -> list[Live]:
    """Forward and backward of one micro-batch through one chunk, beside all others in flight."""
    mesh, number = rank.job.mesh, len(rank.chunks)
    head = rank.last and chunk == number - 1
    counts = in_flight(
        mesh.pp, rank.job.pp_rank, number, max(1, rank.job.micro_batches), rank.flags.group,
        int(rank.flags.overlaps_experts and number > 1), sizes, chunk if head else None,
    )  # fmt: skip
    start = clock.now + 1
    work = _through(rank, rank.chunks[chunk], clock, head=head)
    flying = [max(0, counts[other] - (other == chunk)) for other in range(number)]
    found = [
        _live(f"micro-batches in flight, chunk {other}", sizes[other], start, clock.now, count=flying[other])
        for other in range(number)
        if flying[other]
    ]
    if rests := _rests(rank, counts):
        found.append(replace(_live("rests of blocks around activations", rests, start, clock.now), kind="residue"))
    if rank.first and counts[0]:
        found.append(_live("dropout mask of the embedding", _embedding(rank), start, clock.now, count=counts[0]))
    return found + work


def _rests(rank: Rank, counts: tuple[int, ...]) -> int:
    """What the allocator cannot split off around the activations of the micro-batches in flight."""
    if not in_segments(rank) or rank.job.engine.recompute.granularity == "full":
        return 0
    each = [unsplit(one.bytes for layer in layers for one in saved(rank, layer)) for layers in rank.chunks]
    return sum(count * rests for count, rests in zip(counts, each, strict=True))


def _through(rank: Rank, layers: tuple[int, ...], clock: Clock, *, head: bool) -> list[Live]:
    """Forward and backward of the micro-batch at work through one chunk, and through the head where that is here."""
    full, inputs = checkpoints(rank, layers)
    births: dict[int, int] = {}
    for layer in layers:
        births[layer] = clock.tick(f"forward/layer {layer}")
    found: list[Live] = []
    if head:
        start = clock.tick("head/norm")
        found += head_lives(rank, clock)
        end = clock.now
        found.append(_live("final norm: input and output", final_norm(rank), start, end))
        found += mtp_lives(rank, start, end)
    for layer in reversed(layers):
        at = clock.tick(f"backward/layer {layer}/feed-forward")
        end = clock.tick(f"backward/layer {layer}/attention")
        if layer in inputs:
            found.append(_live(f"layer {layer}: input kept for recomputation", boundary(rank), births[layer], end))
        before = [one for one in _replayed(rank, layers, layer) if one != layer] if layer in full else []
        found += [_kept(f"layer {one}: recomputed", row, at, end) for one in before for row in saved(rank, one)]
        born, word = (at, ": recomputed") if layer in full else (births[layer], "")
        for rows, dies in zip(halves(saved(rank, layer)), (at, end), strict=True):
            found += [_kept(f"layer {layer}{word}", row, born, dies) for row in rows]
        if layer not in full:
            for rows, dies in zip(halves(_selective(rank, layer)), (at, end), strict=True):
                found += [_kept(f"layer {layer}: recomputed", row, dies, dies) for row in rows]
        for dies in (at, end):
            found += [
                _kept(f"layer {layer}: for backward", row, dies, dies, kind="temporary")
                for row in backward(rank, layer, dies == at)
            ]
            found.append(_weight_gradient(rank, dies))
    return found


def _replayed(rank: Rank, layers: tuple[int, ...], layer: int) -> tuple[int, ...]:
    """The layers of a unit whose activations are alive during the backward of one of them: itself and those before."""
    together = unit(rank, layers, layer)
    return together[: together.index(layer) + 1]


def _selective(rank: Rank, layer: int) -> list[Kept]:
    """What selective recomputation or offloading took away of a layer, there again for its backward."""
    away = ("recompute_", "offload_")
    if not any(word.startswith(away) for word in rank.words):
        return []
    words = frozenset(word for word in rank.words if not word.startswith(away))
    left = [(one.row.module, one.row.label) for one in saved(rank, layer)]
    again = []
    for one in saved(replace(rank, words=words, memo={}), layer):
        key = (one.row.module, one.row.label)
        if key in left:
            left.remove(key)
        else:
            again.append(one)
    return again


def _weight_gradient(rank: Rank, at: int) -> Live:
    none = rank.job.engine.gradient_accumulation_fusion or rank.adapters
    size = 0 if none else rank.value("e") * max(linear_shapes(rank), default=0)
    live = _live("weight gradient before it is added to the buffer", size, at, at)
    return replace(live, name="grads", kind="temporary")


def _inference(rank: Rank, clock: Clock) -> list[Live]:
    """A pass without gradients: one layer at a time, then the head."""
    found = []
    for layer in (layer for chunk in rank.chunks for layer in chunk):
        at = clock.tick(f"forward/layer {layer}")
        found += [_kept(f"layer {layer}", row, at, at, kind="temporary") for row in saved(rank, layer)]
    if rank.last:
        start = clock.tick("head/norm")
        found += head_lives(rank, clock)
        found.append(replace(_live("final norm: output", boundary(rank), start, clock.now), kind="temporary"))
    return found


def _embedding(rank: Rank) -> int:
    return rank.value("U") * rank.value("H") if "dropout" in rank.words else 0


def _live(label: str, bytes_: int, born: int, dies: int, count: int = 1) -> Live:
    return Live(name="activations", kind="activation", bytes=bytes_, count=count, born=born, dies=dies, label=label)


def _kept(prefix: str, one: Kept, born: int, dies: int, kind: str = "activation") -> Live:
    return Live(
        name="activations", kind=kind, bytes=one.bytes, born=born, dies=dies, label=f"{prefix}, {one.row.label}",
        formula=one.row.bytes, source=one.row.source,
    )  # fmt: skip
