"""What FSDP and ZeRO gather before a unit computes and reduce after its backward: births and deaths of those buffers.

FSDP2 (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, torch 2.4 to 2.13): a gather writes one flat buffer,
copied out into parameters; in forward the flat buffer lives on until the next unit's copy-out, in backward it is
gathered one unit ahead and freed at its own copy-out. A reduce-scatter's input lives until the next unit's reduce.
FSDP1 (torch/distributed/fsdp/_runtime_utils.py): the gathered flat parameter is the parameters; one unit is prefetched.
"""

from dataclasses import dataclass, field, replace

from flowledger.plan.fsdp.adapters import computed_itemsize
from flowledger.plan.fsdp.state import SHARDED, grad_bytes, grad_itemsize, keeps_unsharded, unsharded_grad_bytes
from flowledger.plan.fsdp.symbols import computes_in
from flowledger.plan.fsdp.units import Unit
from flowledger.plan.job import ITEMSIZE, Job
from flowledger.plan.logits import is_own
from flowledger.plan.timeline import Live
from flowledger.tables.constants import constant

SOURCE = "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py"


@dataclass(slots=True)
class Traffic:
    """The gathers and reductions of one job while its timeline is written."""

    job: Job
    first: bool = False  # this micro-batch is the first of its optimizer step to go back
    lives: list[Live] = field(default_factory=list)
    pending: tuple[int, int, str] | None = None  # bytes, birth and label of the reduce-scatter input that is in flight
    unsharded: list[tuple[str, int, int, str]] = field(default_factory=list)  # unit, and its whole gradients so far

    @property
    def gathers(self) -> bool:
        return self.job.engine.strategy in SHARDED

    @property
    def fsdp2(self) -> bool:
        return self.job.engine.strategy == "fsdp2"

    @property
    def copies(self) -> bool:
        """Whether a gather writes a buffer of its own first."""
        return self.fsdp2 and self.job.shard > 1

    @property
    def gloo(self) -> bool:
        """Whether the backend takes what it moves once more for a moment; gloo does (torch 2.13, seen by its profiler)."""
        return self.copies and self.job.device is None and is_own(self.job.engine)

    def bytes_of(self, unit: Unit) -> int:
        """A whole unit in the dtypes that it computes in."""
        return (unit.base - unit.away) * computes_in(self.job.engine) + unit.added * computed_itemsize(self.job)

    def moved(self, unit: Unit) -> int:
        """Bytes that a gather of a unit fills."""
        return self.bytes_of(unit) - self.staying(unit) * computes_in(self.job.engine)

    def staying(self, unit: Unit) -> int:
        """Elements that do not travel: of experts of which no other rank has a shard."""
        return self.dealt(unit) if self.job.shard <= self.job.mesh.ep else 0

    def dealt(self, unit: Unit) -> int:
        """Elements of experts that are dealt to ranks: they are a unit inside the layer's."""
        return unit.steps.get("experts", 0) if self.job.mesh.ep > 1 else 0

    def split(self, unit: Unit) -> tuple[Unit, Unit | None]:
        """A layer, and the experts in it that are dealt to ranks: FSDP2 gathers and reduces those by themselves."""
        dealt = self.dealt(unit)
        if not (dealt and self.fsdp2):
            return unit, None
        rest = {step: size for step, size in unit.steps.items() if step != "experts"}
        outer = replace(unit, base=unit.base - unit.away - dealt, away=0, steps=rest)
        name, every = f"{unit.name} experts", dealt + unit.away
        return outer, Unit(name, unit.layer, every, 0, 0, dealt, steps={"experts": dealt}, away=unit.away)

    def experts(self, unit: Unit, at: int) -> None:
        """Dealt experts are gathered when their own layer begins its backward, and no sooner."""
        size = (self.dealt(unit) - self.staying(unit)) * computes_in(self.job.engine)
        label = f"{unit.name}: output of the gather of experts"
        self.add("comm_buffer", "comm_buffer", size, at, at, label, "elements * compute itemsize")

    def add(self, name: str, kind: str, size: int, born: int, dies: int, label: str, formula: str) -> None:
        if size > 0:
            self.lives.append(
                Live(
                    name=name, kind=kind, bytes=size, born=born, dies=dies, label=label, formula=formula, source=SOURCE
                )
            )

    def whole(self, unit: Unit, born: int, dies: int) -> None:
        """The gathered parameters of a unit, while it computes."""
        if self.gathers:
            self.add(
                "params", "comm_buffer", self.bytes_of(unit), born, dies, f"{unit.name}: gathered parameters",
                "elements * compute itemsize",
            )  # fmt: skip

    def flat(self, unit: Unit, born: int, dies: int) -> None:
        """The gather's own output buffer, before it is copied out."""
        if self.copies:
            self.add(
                "comm_buffer", "comm_buffer", self.moved(unit), born, dies, f"{unit.name}: output of the gather",
                "elements * compute itemsize",
            )  # fmt: skip

    def ahead(self, unit: Unit, born: int, dies: int) -> None:
        """A gather that was issued before its unit's turn."""
        if self.gathers and self.job.shard > 1:
            size = self.bytes_of(unit) - self.dealt(unit) * computes_in(self.job.engine)
            label = f"{unit.name}: gathered ahead"
            self.add("comm_buffer", "comm_buffer", size, born, dies, label, "elements * compute itemsize")
            self.backend(unit, size, born)

    def backend(self, unit: Unit, size: int, at: int) -> None:
        """The backend's own copy of what moves."""
        if self.gloo:
            self.add("comm_buffer", "comm_buffer", size, at, at, f"{unit.name}: copy inside gloo", "as what it moves")

    def gradient(self, unit: Unit, step: str, elements: int, born: int) -> None:
        """A gradient of whole weights, from the step that makes it to the unit's reduction."""
        size = elements * self._learns_in()
        if size:
            self.unsharded.append((unit.name, size, born, f"{unit.name} {step}: gradient before reduction"))

    def reduce(self, unit: Unit, at: int) -> None:
        """The unit's reduction: whole gradients die, the reduction's input lives until the next, shards are born."""
        for name, size, born, label in self.unsharded:
            if name in unit.parts:
                self.add("grads", "grad", size, born, at, label, "elements * compute itemsize")
        self.unsharded = [one for one in self.unsharded if one[0] not in unit.parts]
        self.settle(at - 1)
        there = unit.away + self.staying(unit) if self.job.engine.lora is None else 0
        wide = (unit.trained - there) * self._reduced_in()
        self.backend(unit, wide, at + 1)  # to add to, once the whole gradients are gone
        if self.fsdp2:
            self.pending = (wide, at, f"{unit.name}: input of the reduce-scatter")
        elif self._reduced_in() != self._learns_in():
            self.add("comm_buffer", "comm_buffer", wide, at, at, f"{unit.name}: gradient in the reduce dtype", "elements * reduce itemsize")  # fmt: skip
        fresh = self._fresh()
        shard = grad_bytes(self.job, unit)
        if not fresh:
            made = at + self.gloo  # as its copy, when the whole gradients are gone
            self.add(
                "grads", "grad", shard, made, made, f"{unit.name}: output of the reduce-scatter", "elements / shard"
            )

    def settle(self, at: int) -> None:
        """The reduce-scatter input in flight is done with."""
        if self.pending:
            size, born, label = self.pending
            self.add("comm_buffer", "comm_buffer", size, born, max(born, at), label, "elements * reduce itemsize")
            self.pending = None

    def kept(self, unit: Unit, at: int, end: int, there: int) -> None:
        """Gradients that stay until the optimizer step, and whole ones that wait for the last micro-batch.

        there: from when those of earlier micro-batches are.
        """
        shard = grad_bytes(self.job, unit)
        if keeps_unsharded(self.job):
            self.add("grads", "grad", unsharded_grad_bytes(self.job, unit), 0, at, f"{unit.name}: gradients kept whole", "elements")  # fmt: skip
        born = at + (self.job.shard > 1)  # made when the whole gradients are gone
        self.add(
            "grads", "grad", shard, born if self._fresh() else there, end, f"{unit.name}: gradients", "elements / shard"
        )

    def _fresh(self) -> bool:
        """Whether this micro-batch is the first to leave reduced gradients."""
        return self.first or keeps_unsharded(self.job)

    def _reduced_in(self) -> int:
        engine = self.job.engine
        return ITEMSIZE[engine.reduce_dtype] if engine.reduce_dtype else self._learns_in()

    def _learns_in(self) -> int:
        """Bytes of one number of a whole gradient: that of adapters, where they alone are trained."""
        return computed_itemsize(self.job) if self.job.engine.lora else computes_in(self.job.engine)


def buckets(job: Job, trained: int, last: int) -> list[Live]:
    """Buffers that DDP and DeepSpeed keep beside the gradients.

    DDP's reducer holds every gradient a second time unless `gradient_as_bucket_view` is set (torch
    nn/parallel/distributed.py; off by default). DeepSpeed gathers gradients in a bucket of 5e8 elements, two of them when
    it overlaps communication (runtime/zero/stage_1_and_2.py, stage3.py).
    """
    size, strategy = grad_itemsize(job), job.engine.strategy
    if not job.gradients or not trained:
        return []
    if strategy == "ddp":
        return [_buffer(trained * size, last, "gradient buckets of DDP", "elements * itemsize")]
    if strategy.startswith("zero"):
        bucket = min(int(constant("zero_bucket_elements")), trained) * computes_in(job.engine)
        number = int(constant("zero_buckets"))
        return [_buffer(bucket * number, last, "reduce buckets of DeepSpeed", "min(5e8, elements) * itemsize * 2")]
    return []


def _buffer(size: int, last: int, label: str, formula: str) -> Live:
    return Live(
        name="comm_buffer", kind="comm_buffer", bytes=size, born=0, dies=last, label=label, formula=formula,
        source="torch nn/parallel/distributed.py; DeepSpeed runtime/zero", persistent=True,
    )  # fmt: skip
