"""What a pipeline stage holds beside the micro-batch at work: activations of others in flight, and what travels.

torch.distributed.pipelining 2.13: a stage has a buffer for each micro-batch of a step that it receives from, whatever their
order, and keeps what it has sent until the backward pass of it; interleaved all that it has sent, to the end of the step
(schedules.py, stage.py).
"""

from flowledger.plan.fsdp.layers import Pass
from flowledger.plan.fsdp.units import is_first, is_last
from flowledger.plan.job import ITEMSIZE, Job
from flowledger.plan.logits import is_own, written

SOURCE = "torch/distributed/pipelining/stage.py"


def in_flight(job: Job) -> float:
    """Micro-batches whose activations a stage holds at once, this one among them.

    1F1B: min(micro-batches, pp - rank), GPipe (and 1F1B with fewer micro-batches than stages) all. Interleaved: so many
    chunks as it warms up with, and one more, each of a share of the rank's layers.
    """
    number, pp, chunks = job.micro_batches, job.mesh.pp, job.mesh.vpp
    if job.engine.pipeline == "interleaved":
        return min(_warm_up(job) + 1, number * chunks) / chunks
    one_by_one = job.engine.pipeline == "1f1b" and (number >= pp or not is_own(job.engine))
    return min(number, pp - job.pp_rank) if one_by_one else number


def _in_round(job: Job) -> int:
    """Micro-batches that go through one chunk before the next is at work, interleaved."""
    return job.micro_batches // max(1, job.micro_batches // job.mesh.pp)


def one_round(job: Job) -> bool:
    """Whether, interleaved, all micro-batches go back through one chunk before any goes back through the next."""
    return job.mesh.vpp > 1 and _in_round(job) == job.micro_batches


def _warm_up(job: Job) -> int:
    """Passes forward before the first backward, interleaved; a pass is one micro-batch through one chunk."""
    chunks = job.mesh.vpp
    due = (chunks - 1) * _in_round(job) + 2 * (job.mesh.pp - 1 - job.pp_rank)
    return min(due, job.micro_batches * chunks)


def strays(job: Job) -> bool:
    """Whether a chunk's backward pass gathers another chunk's layer ahead: that of the pass forward just before it.

    FSDP2 gathers in the reverse order of what went forward since the last backward pass (_fsdp_param_group.py
    `_backward_prefetch`, torch 2.13); interleaved, that is now and then another chunk.
    """
    chunks, each, warm = job.mesh.vpp, _in_round(job), _warm_up(job)
    return any(
        (warm + at) // each % chunks != chunks - 1 - at // each % chunks
        for at in range(job.micro_batches * chunks - warm)
    )


def fills(job: Job) -> bool:
    """Whether all micro-batches of an optimizer step are in flight before the first goes back."""
    return job.mesh.pp > 1 and job.gradients and in_flight(job) >= job.micro_batches > 1


def add_others(run: Pass, begun: int, last: int, *, gone: bool) -> None:
    """What other micro-batches of the step hold from its first instant to its `last`; backward begins at `begun`.

    gone: some went back already, so that those in flight are fewer where all of them were.
    """
    job = run.job
    if job.mesh.pp == 1:
        return
    left = in_flight(job) - (gone and fills(job))
    waiting = left - 1 if job.gradients else 0
    if waiting > 0:
        kept = sum(
            one.bytes for one in run.lives if one.kind == "activation" and one.born < begun <= one.dies and not one.host
        )
        label = f"activations of {waiting:g} more micro-batches in flight"
        less = 1 - job.last.tokens / job.tokens if job.last and fills(job) else 0  # the smaller one is among them
        run.add("activations", round((waiting - less) * kept), 0, last, label, formula="(in flight - 1) * activations")
    if is_own(job.engine):
        _travelling(run, last, left)
    elif is_last(job) and job.head == "lm" and job.gradients:
        _outputs(run, last)


def _travelling(run: Pass, last: int, left: float) -> None:
    """Hidden states [N, H] of each micro-batch and their gradients, in buffers of the stage that receives them.

    left: micro-batches in flight, whose inputs count as their activations.
    """
    job, number, chunks = run.job, run.job.micro_batches, run.job.mesh.vpp
    after, before = chunks - is_last(job), chunks - is_first(job)  # chunks of layers that send to others, and receive
    at_work = round(left * before) if job.gradients else min(before, 1)  # what was received is their input
    more = {"kind": "comm_buffer", "formula": "m*r*N*H", "source": SOURCE}
    run.add("comm_buffer", (number * before - at_work) * run.stream, 0, last, "received hidden states", **more)
    if job.gradients:
        run.add("comm_buffer", number * after * run.stream, 0, last, "received gradients of hidden states", **more)
    sent = number * after - min(after, 1)
    if job.gradients and job.engine.pipeline == "interleaved":
        sent = number * after + number * before - at_work
    elif job.gradients:
        sent = after * min(number, round(in_flight(job)) + 1)
    run.add("hidden_states", sent * run.stream, 0, last, "sent hidden states", kind="temporary", source=SOURCE)


def _outputs(run: Pass, last: int) -> None:
    """The last stage hands its caller the outputs of all micro-batches together: they stay until the step ends."""
    job = run.job
    recast = job.engine.logits.dtype == "float32" and not job.engine.logits.upcast
    itemsize = ITEMSIZE["float32"] if recast else written(job.engine)
    size = itemsize * job.local_tokens * -(-job.architecture.vocab // job.mesh.tp) * (job.micro_batches - 1)
    label, source = "logits of earlier micro-batches", f"{SOURCE} output_chunks"
    run.add("logits", size, 0, last, label, kind="temporary", formula="(m - 1)*T*V*e", source=source)
