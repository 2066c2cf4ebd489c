"""The backward pass of one micro-batch and the optimizer step in instants, after the forward pass was written."""

from dataclasses import replace

from flowledger.plan.fsdp.forward import Forward
from flowledger.plan.fsdp.layers import backward, forward
from flowledger.plan.fsdp.outer import Moments
from flowledger.plan.fsdp.pipeline import add_others, fills, one_round, strays
from flowledger.plan.fsdp.sac import kept_outputs
from flowledger.plan.fsdp.state import SPLITS_GRADS, grad_itemsize, step_temporary_bytes
from flowledger.plan.fsdp.steps import Step
from flowledger.plan.fsdp.symbols import computes_in, is_autocast
from flowledger.plan.fsdp.traffic import buckets
from flowledger.plan.fsdp.units import Unit, gradient_shares, is_first, is_last
from flowledger.plan.logits import WITH_ITS_NAME, inside
from flowledger.plan.timeline import Live

OPTIMIZER = "optimizer/step"
PARTIAL = "torch DTensor: embedding_dense_backward of a vocabulary that is cut gives a partial sum of all of it"


class Write(Forward):
    """One timeline while it is written: call `forward`, then (with gradients) `backward` and `step`, then `finish`."""

    over = 0  # last instant of the micro-batch
    released = 0  # last instant of the embedding, where it is a unit of its own
    cut: tuple[str, int] | None = None  # what the embedding makes of its gradient of the whole vocabulary
    whole = 0  # bytes of that
    normed = 0  # last instant of the final norm's backward
    ended = 0  # last instant of the backward pass, but for reductions
    there = 0  # from when gradients of the micro-batches before this one are there

    def backward(self) -> None:
        """Final norm, layers in reverse, embedding."""
        if self.last:
            self._weights(self.last, "head", self.last.trained, self.begun)
        if self.norm:
            backward(self.run, self.norm, lambda step, at: None)
        after, self.normed = self.clock.now + 1, self.clock.now
        if self.layers and self.job.engine.reshard_after_forward and self._looks_ahead:
            whole = inside(self.job) and not self.outer.tail
            hooked = (
                self._instant("entropy/backward") if whole else 0
            ) or self.begun  # a stage without head has neither
            regathered = 0 if inside(self.job) else self._instant("head/gather")
            self.traffic.ahead(self.layers[-1], regathered or hooked, self.normed)
        if self.outer.tail:
            self._reduced(self.outer.tail)
        for number in range(len(self.layers) - 1, -1, -1):
            self._layer_backward(number)
        self.ended = self.clock.now
        if is_first(self.job):
            self._embedding()
        self._outside()
        self.over = self.clock.now
        self.run.add(
            "grads",
            self.run.stream,
            after,
            self.clock.now,
            "gradient of the residual stream",
            kind="temporary",
            formula="r*T*H",
        )

    def _outside(self) -> None:
        """The root's reduction comes when backward is over, and after it that of an embedding with a unit of its own."""
        if self.outer.root and self.outer.start:
            self._reduced(self.outer.root)
        elif self.outer.start and self.outer.has_root:
            self.traffic.settle(self.clock.now)
        if self.cut and self.first:
            at = self.clock.tick("backward/embedding/cut")
            self.released = at
            self._weights(self.first, *self.cut, at)
            self.run.add("grads", self.whole, self.ended, at, "embedding: gradient of the whole vocabulary", kind="temporary", formula="tp*e*V*H", source=PARTIAL)  # fmt: skip
        if self.outer.root and not self.outer.start:
            self._reduced(self.outer.root)
        self.released = self.clock.now
        if self.outer.start:
            self._reduced(self.outer.start)

    def _layer_backward(self, number: int) -> None:
        unit, layer, start = self.layers[number], self.made[number], self.clock.now + 1
        if self.checkpointed:
            forward(self.run, layer, "recompute", saves=True, inside=True)
            self._boundary(number, start)
        shares = gradient_shares(unit, layer)
        outer, inner = self.traffic.split(unit)
        kept = not self.job.engine.reshard_after_forward
        born = self.starts[number] if kept else start

        def made(step: Step, at: int) -> None:
            one = inner if inner and step.module == "experts" else outer
            self._weights(one, step.name, shares[step.name], at)
            if one is inner:
                self.traffic.whole(one, born, at)
                self._reduced_at(one, at)

        backward(self.run, layer, made)
        computed = self.clock.now  # gathered parameters are freed before gradients are reduced
        self._reduced(outer)
        end = self.clock.now
        self._cast(unit, self.starts[number], end)
        self.traffic.whole(outer, born, computed)
        if not kept:
            self.traffic.experts(unit, start)
        self._ahead(number, start, end)

    def _ahead(self, number: int, start: int, end: int) -> None:
        """What is gathered while a layer goes back: the one before it; where it begins a chunk, perhaps one of another."""
        kept = not self.job.engine.reshard_after_forward
        before = self.layers[number - 1] if number else self.outer.start
        if not self.begins(number):
            if before and not kept and self._looks_ahead:
                self.traffic.ahead(before, start, end)
            return
        if before and not kept and strays(self.job):
            self.traffic.ahead(before, start, end)
        self.traffic.settle(end)
        if one_round(self.job):
            self.there = end + 1

    @property
    def _looks_ahead(self) -> bool:
        """Whether backward gathers the next unit ahead: FSDP2 forgets the order of the forward passes once one went back."""
        return self.is_first or not fills(self.job)

    def _boundary(self, number: int, start: int) -> None:
        """A checkpoint keeps the layer's input until its backward is done; selective ones some outputs as well."""
        job, at, end = self.job, self.starts[number], self.clock.now
        label, size = self.layers[number].name, self.run.stream
        if job.engine.offload.activation:
            self.run.lives.append(
                Live(
                    name="activations", kind="activation", bytes=size, born=at, dies=end, host=True,
                    label=f"{label}: input, on the host",
                )
            )  # fmt: skip
            at = start
        last = end + len(self.made[number].steps)
        self.run.add("activations", size, at, last, f"{label}: input kept by its checkpoint", formula="r*T*H")
        if job.engine.recompute.granularity == "selective":
            for one in kept_outputs(self.run):
                self.run.add(
                    "activations",
                    one.bytes,
                    self.starts[number],
                    start,
                    f"{label}: {one.row.label}",
                    formula=one.row.bytes,
                    source=one.row.source,
                )

    def _cast(self, unit: Unit, born: int, dies: int) -> None:
        """torch.autocast keeps the narrow copy of every weight it cast until the region and its backward end."""
        if is_autocast(self.job.engine):
            self.run.add(
                "params",
                unit.base * computes_in(self.job.engine),
                born,
                dies,
                f"{unit.name}: cast weights",
                kind="temporary",
                formula="e*elements",
                source="torch.autocast weight cache",
            )

    def _weights(self, unit: Unit, step: str, elements: int, at: int) -> None:
        """Gradients that this instant makes."""
        job = self.job
        if not elements:
            return
        if job.engine.strategy in SPLITS_GRADS:
            self.traffic.gradient(unit, step, elements, at)
            return
        fresh = self.is_first
        self.direct.append(
            (f"{unit.name} {step}: gradient", elements * grad_itemsize(job), at if fresh else self.there)
        )
        if not fresh or is_autocast(job.engine):
            largest = min(elements, unit.largest)
            self.run.add(
                "grads",
                largest * computes_in(job.engine),
                at,
                at,
                f"{unit.name} {step}: gradient before it is added",
                kind="temporary",
                formula="e*elements",
            )

    def _reduced(self, unit: Unit) -> None:
        if self.job.engine.strategy in SPLITS_GRADS:
            self._reduced_at(unit, self.clock.tick(f"backward/{unit.name}/reduce"))
            if self.traffic.gloo:
                self.clock.tick(f"backward/{unit.name}/reduced")

    def _reduced_at(self, unit: Unit, at: int) -> None:
        self.traffic.reduce(unit, at)
        self.ends.append((unit, at, self.there))

    def _embedding(self) -> None:
        """The embedding's gradient is as large as the embedding, whatever few of its rows were read."""
        at, unit = self.clock.tick("backward/embedding"), self.first
        self.ended = at
        if unit is None:
            return
        tied = (
            self.job.architecture.tied and self.job.head == "lm" and is_last(self.job) and self.job.engine.lora is None
        )
        size = unit.trained * computes_in(self.job.engine)
        if self.job.mesh.tp > 1 and self.job.engine.strategy == "single":
            label = "embedding: gradient of the whole vocabulary"
            self.run.add(
                "grads", size * self.job.mesh.tp, at, at, label, kind="temporary", formula="tp*e*V*H", source=PARTIAL
            )
        if self.job.mesh.tp > 1 and self.job.engine.strategy == "fsdp2":
            self.cut = ("embedding", unit.trained)
            self.whole = size * self.job.mesh.tp
            if tied:
                self._weights(unit, "head", unit.trained, self.begun)
            return
        self._weights(unit, "head" if tied else "embedding", unit.trained, self.begun if tied else at)
        if tied and not self.is_first and self.job.engine.strategy not in SPLITS_GRADS:
            label = "head: gradient that waits for the embedding's"
            self.run.add("grads", size, self.begun + 1, at, label, kind="temporary", formula="e*V*H")
        if tied:
            label = "embedding: gradient before it is added"
            self.run.add("grads", size, at, at, label, kind="temporary", formula="e*V*H")

    def step(self) -> None:
        """The optimizer: its temporaries, and the last instant of the gradients."""
        self.traffic.settle(self.clock.now)
        at = self.clock.tick(OPTIMIZER)
        size = step_temporary_bytes(self.job, self.units)
        self.run.add(
            "optimizer_state",
            size,
            at,
            at,
            "temporaries of the optimizer step",
            kind="temporary",
            source="torch/optim/adam.py",
        )
        for unit, reduced, there in self.ends:
            self.traffic.kept(unit, reduced, at, there)
        for label, size, born in self.direct:
            self.traffic.add("grads", "grad", size, born, at, label, "elements * itemsize")

    def finish(self) -> list[Live]:
        """All tensors but the states. What spans the pass ends with it."""
        last = self.clock.now
        again, ended = (self._instant("head/gather") or self.begun, self.ended) if self.job.gradients else (last, last)
        normed = self.normed if self.job.gradients else last
        moments = Moments(
            copied=self.copied, asked=self.asked, returned=self.returned, again=again, normed=normed, ended=ended,
            released=self.released if self.job.gradients else last,
        )  # fmt: skip
        self.outer.gather(self.traffic, moments)
        for number, (unit, born, dies) in enumerate(self.flats):
            following = self.asked if self.outer.tail else self.returned
            self.traffic.flat(unit, born, dies if number < len(self.flats) - 1 else following)
        self.run.lives = [
            replace(one, dies=self.over) if one.name == "logits" and one.dies == WITH_ITS_NAME else one
            for one in self.run.lives
        ]
        add_others(self.run, self.begun, last, gone=not self.is_first)
        trained = sum(unit.trained for unit in self.units)
        return [*self.run.lives, *self.traffic.lives, *buckets(self.job, trained, last)]
