"""The backward pass of one micro-batch and the optimizer step in instants, after the forward pass was written."""

from flowledger.plan.fsdp.forward import Forward
from flowledger.plan.fsdp.layers import backward, forward
from flowledger.plan.fsdp.sac import kept_outputs
from flowledger.plan.fsdp.state import SHARDED, SPLITS_GRADS, grad_itemsize, step_temporary_bytes
from flowledger.plan.fsdp.symbols import computes_in, is_autocast
from flowledger.plan.fsdp.traffic import buckets
from flowledger.plan.fsdp.units import Unit, gradient_shares, is_first, is_last
from flowledger.plan.timeline import Live

OPTIMIZER = "optimizer/step"


class Write(Forward):
    """One timeline while it is written: call `forward`, then (with gradients) `backward` and `step`, then `finish`."""

    def backward(self) -> None:
        """Final norm, layers in reverse, embedding."""
        made = self._head_gradient()
        if self.last:
            self._weights(self.last, "head", self.last.trained, made)
        if self.norm:
            backward(self.run, self.norm, lambda step, at: None)
        after = self.clock.now + 1
        if self.last and not self.one_root:
            self._reduced(self.last)
        for number in range(len(self.layers) - 1, -1, -1):
            self._layer_backward(number)
        if is_first(self.job):
            self._embedding()
        self.run.add(
            "grads",
            self.run.stream,
            after,
            self.clock.now,
            "gradient of the residual stream",
            kind="temporary",
            formula="r*T*H",
        )

    def _head_gradient(self) -> int:
        """When the head's gradient is born: with the first chunk, where the loss goes over chunks."""
        chunked = self.job.engine.logits.implementation == "chunked"
        return (self._instant("loss/backward") if chunked else 0) or self.begun

    def _layer_backward(self, number: int) -> None:
        unit, layer, start = self.layers[number], self.made[number], self.clock.now + 1
        if self.checkpointed:
            forward(self.run, layer, "recompute", saves=True, inside=True)
            self._boundary(number, start)
        shares = gradient_shares(unit, layer)
        backward(self.run, layer, lambda step, at: self._weights(unit, step.name, shares[step.name], at))
        computed = self.clock.now  # gathered parameters are freed before gradients are reduced
        self._reduced(unit)
        end = self.clock.now
        self._cast(unit, self.starts[number], end)
        kept = not self.job.engine.reshard_after_forward
        self.traffic.whole(unit, self.starts[number] if kept else start, computed)
        if number and not kept:
            self.traffic.ahead(self.layers[number - 1], start, end)

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
        fresh = job.micro_batches == 1
        self.direct.append((f"{unit.name} {step}: gradient", elements * grad_itemsize(job), at if fresh else 0))
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
            at = self.clock.tick(f"backward/{unit.name}/reduce")
            self.traffic.reduce(unit, at)
            self.ends.append((unit, at))

    def _embedding(self) -> None:
        """The embedding's gradient is as large as the embedding, whatever few of its rows were read."""
        at, unit = self.clock.tick("backward/embedding"), self.first
        if unit is None:
            return
        tied = (
            self.job.architecture.tied and self.job.head == "lm" and is_last(self.job) and self.job.engine.lora is None
        )
        size = unit.trained * computes_in(self.job.engine)
        if tied:
            self._weights(unit, "head", unit.trained, self._head_gradient())
            self.run.add(
                "grads", size, at, at, "embedding: gradient before it is added", kind="temporary", formula="e*V*H"
            )
        else:
            self._weights(unit, "embedding", unit.trained, at)
        if self.one_root and self.last:
            self._reduced(self.last)
        self._reduced(unit)

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
        for unit, reduced in self.ends:
            self.traffic.kept(unit, reduced, at)
        for label, size, born in self.direct:
            self.traffic.add("grads", "grad", size, born, at, label, "elements * itemsize")

    def finish(self) -> list[Live]:
        """All tensors but the states. What spans the pass ends with it."""
        last = self.clock.now
        if self.first and self.one_root and self.job.engine.strategy in SHARDED:
            self.traffic.whole(self.first, 0, last)
            if self.last:
                self.traffic.whole(self.last, 0, last)
        elif self.first:
            self.traffic.whole(self.first, 0, 0)
        self._in_flight(last)
        trained = sum(unit.trained for unit in self.units)
        return [*self.run.lives, *self.traffic.lives, *buckets(self.job, trained, last)]

    def _in_flight(self, last: int) -> None:
        """A pipeline stage keeps the activations of micro-batches that are still on their way through later stages.

        1F1B (torch.distributed.pipelining): min(micro-batches, pp - rank) at once, this one among them.
        """
        job = self.job
        others = min(job.micro_batches, job.mesh.pp - job.pp_rank) - 1
        if others > 0 and job.gradients:
            waiting = [one for one in self.run.lives if one.kind == "activation" and one.born < self.begun <= one.dies]
            size = others * sum(one.bytes for one in waiting if not one.host)
            label = f"activations of {others} more micro-batches in flight"
            self.run.add("activations", size, 0, last, label, formula="(min(m, pp - rank) - 1) * activations")
