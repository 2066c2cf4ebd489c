"""Forward and backward of decoder layers, step by step: activations saved, and what each step needs for a moment."""

from collections.abc import Callable
from dataclasses import dataclass, field

from flowledger.plan.fsdp.adapters import (
    STEP_OF,
    Adapter,
    adapters,
    computed_itemsize,
    saved_bytes,
    shares_input,
)
from flowledger.plan.fsdp.steps import Step, kept_by, steps
from flowledger.plan.fsdp.symbols import computes_in, flags, keeps_stream, stream_in, symbols
from flowledger.plan.job import Job
from flowledger.plan.saved import Kept
from flowledger.plan.timeline import Clock, Live
from flowledger.plan.weights import weights


@dataclass(slots=True)
class Open:
    """Something saved in forward whose backward has not come yet."""

    step: int
    born: int
    what: Kept | None
    size: int
    label: str


@dataclass(slots=True)
class Pass:
    """The layers of one job while its timeline is written."""

    job: Job
    clock: Clock
    variant: str = ""
    lives: list[Live] = field(default_factory=list)
    names: dict[str, object] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    stream: int = 0  # bytes of the residual stream

    def __post_init__(self) -> None:
        self.names, self.held = symbols(self.job), flags(self.job)
        tokens = int(str(self.names["T"]))
        if self.job.engine.sequence_parallel:
            self.names["N"] = -(-tokens // self.job.mesh.tp)
        self.stream = stream_in(self.job.engine) * int(str(self.names["N"])) * self.job.architecture.hidden

    def add(self, name: str, size: int, born: int, dies: int, label: str, **more: str) -> None:
        """One tensor, if it has bytes."""
        if size > 0:
            kind = more.pop("kind", "activation")
            self.lives.append(Live(name=name, kind=kind, bytes=size, born=born, dies=dies, label=label, **more))  # type: ignore[arg-type]  # texts: formula, source

    def temporary(self, step: Step, life: str, at: int, where: str, held: set[str]) -> None:
        """What a step needs for a moment."""
        for one in kept_by(self.job, step, self.names, held, life, self.variant):
            self.add(
                "activations" if life == "forward" else "grads", one.bytes, at, at, f"{where} {one.row.label}",
                kind=one.row.kind, formula=one.row.bytes, source=one.row.source,
            )  # fmt: skip


@dataclass(slots=True)
class Layer:
    """One layer between its forward and its backward."""

    label: str
    steps: list[Step]
    pairs: list[Adapter] = field(default_factory=list)
    open: list[Open] = field(default_factory=list)
    reached: int = 0  # the first step that has a backward pass

    @property
    def saved(self) -> int:
        """Bytes that wait for the backward pass."""
        return sum(one.size for one in self.open)


def decoder_layer(job: Job, index: int) -> Layer:
    """A layer of the model, with its adapters."""
    return Layer(f"layer {index}", steps(job, index), _adapters(job, index))


def forward(run: Pass, found: Layer, phase: str, *, saves: bool, inside: bool = False, blind: bool = False) -> None:
    """One layer forward. `saves`: its activations stay until `backward`; else only what it needs for a moment.

    `inside`: its input is held by someone else already (a checkpoint). `blind`: its input needs no gradient (frozen
    embeddings), so that nothing is saved before the first adapter.
    """
    found.open = []
    held = (run.held - {"grad", "no_grad"}) | ({"grad"} if saves else {"no_grad"})
    start = run.clock.now + 1
    stream_born, last = start, start + len(found.steps) - 1
    first = True
    for number, step in enumerate(found.steps):
        at = run.clock.tick(f"{phase}/{found.label}/{step.name}")
        where = f"{found.label} {step.name}:"
        own = held | _step_flags(run.job, step)
        run.temporary(step, "forward", at, where, own)
        _adapter_moment(run, found, step, at, where, forward=True, casts=not saves)
        if blind and any(STEP_OF.get(pair.module) == step.module for pair in found.pairs):
            blind, found.reached = False, number
        if saves and not blind:
            for one in kept_by(run.job, step, run.names, own, "saved", run.variant):
                found.open.append(Open(number, at, one, one.bytes, f"{where} {one.row.label}"))
            for pair in found.pairs:
                if STEP_OF.get(pair.module) == step.module:
                    size = saved_bytes(run.job, pair, int(str(run.names["T"])))
                    found.open.append(Open(number, at, None, size, f"{where} adapter of {pair.module}"))
        if step.starts and not (first and inside):
            if saves and not blind and keeps_stream(run.job, step.module):
                found.open.append(Open(number, stream_born, None, run.stream, f"{where} residual stream"))
            else:
                run.add("activations", run.stream, stream_born, last, f"{where} residual stream", kind="temporary")
        elif step.module == "norm" and saves and not blind and not step.starts and keeps_stream(run.job, step.module):
            found.open.append(Open(number, at, None, run.stream, f"{where} output of the branch"))
        first = first and not step.starts
        if step.ends and number < len(found.steps) - 1:
            stream_born = at
        if step.ends and number == len(found.steps) - 1:
            run.add("activations", run.stream, at, at, f"{where} residual stream, next", kind="temporary")


def backward(run: Pass, layer: Layer, on_step: Callable[[Step, int], None]) -> None:
    """One layer backward. `on_step(step, instant)` adds gradients of weights."""
    held = run.held | {"grad"}
    for number in range(len(layer.steps) - 1, layer.reached - 1, -1):
        step = layer.steps[number]
        at = run.clock.tick(f"backward/{layer.label}/{step.name}")
        where = f"{layer.label} {step.name}:"
        run.temporary(step, "backward", at, where, held | _step_flags(run.job, step))
        _adapter_moment(run, layer, step, at, where, forward=False)
        on_step(step, at)
        for one in layer.open:
            if one.step == number:
                more = {"formula": one.what.row.bytes, "source": one.what.row.source} if one.what else {}
                run.add("activations", one.size, one.born, at, one.label, **more)


def _step_flags(job: Job, step: Step) -> set[str]:
    """A frozen linear keeps its input only where an adapter of the same dtype reads it."""
    if job.engine.lora is None:
        return set()
    steps_of = {"gate": ("gate", "up"), "plain_up": ("up",)}.get(step.module, (step.module,))
    return {"trained"} if any(shares_input(job, one) for one in steps_of) else set()


def _adapters(job: Job, layer: int) -> list[Adapter]:
    if job.engine.lora is None:
        return []
    return adapters(job, tuple(weight for weight in weights(job.architecture) if weight.layer == layer))


def _adapter_moment(
    run: Pass, layer: Layer, step: Step, at: int, where: str, *, forward: bool, casts: bool = False
) -> None:
    """An adapter's product, scaled, beside the frozen output; in backward its gradient and that of its input.

    `casts`: nothing keeps its input, which it casts for itself where it is wider than the model.
    """
    size, tokens = computed_itemsize(run.job), int(str(run.names["T"]))
    casts = casts and size > computes_in(run.job.engine)
    here = [pair for pair in layer.pairs if STEP_OF.get(pair.module) == step.module]
    if here:
        widest = max(2 * one.outputs + casts * one.inputs if forward else one.outputs + one.inputs for one in here)
        run.add(
            "activations" if forward else "grads", size * tokens * widest, at, at, f"{where} adapter's product",
            kind="temporary", formula="itemsize * T * (in + out)", source="peft 0.21 tuners/lora/layer.py Linear.forward",
        )  # fmt: skip
