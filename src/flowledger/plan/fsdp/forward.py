"""The forward pass of one micro-batch in instants: embedding, layers, final norm, head and loss."""

from flowledger.plan.fsdp.layers import Layer, Pass, decoder_layer, forward
from flowledger.plan.fsdp.outer import FOREVER, Outer
from flowledger.plan.fsdp.state import SPLITS_GRADS, units
from flowledger.plan.fsdp.steps import Step
from flowledger.plan.fsdp.symbols import computes_in, is_packed_loop, stream_in
from flowledger.plan.fsdp.traffic import Traffic
from flowledger.plan.fsdp.units import Unit, is_first, is_last, layer_units, outer_units
from flowledger.plan.job import Job
from flowledger.plan.logits import head_rows, inside, logits_lives
from flowledger.plan.timeline import Clock


class Forward:
    """One timeline while its forward pass is written."""

    def __init__(self, job: Job, variant: str = "", *, first: bool | None = None) -> None:
        self.job, self.clock, self.is_first = job, Clock(), job.micro_batches == 1 if first is None else first
        self.first, self.last = outer_units(job)
        self.units, self.layers = units(job), layer_units(job)
        variant = variant or ("compiled" if job.engine.compile else "")
        self.run, self.traffic, self.outer = Pass(job, self.clock, variant), Traffic(job, self.is_first), Outer(job)
        if not (self.is_first or job.engine.strategy in SPLITS_GRADS):
            self.run.held.add("added")
        self.made: list[Layer] = []
        self.flats: list[tuple[Unit, int, int]] = []  # of each layer: its gather's output, from birth to death
        self.starts: list[int] = []  # first instant of each layer's forward
        self.norm: Layer | None = None
        self.begun = 0  # first instant of the backward pass
        self.copied = 0  # instant at which the first layer is copied out
        self.returned = 0  # last instant inside the model's forward
        self.asked = 0  # instant at which the head's unit is gathered
        self.ends: list[
            tuple[Unit, int, int]
        ] = []  # when each unit's gradients were reduced, and earlier ones are there
        self.direct: list[tuple[str, int, int]] = []  # gradients that no reduction cuts: label, bytes, birth

    def forward(self) -> None:
        """Embedding, layers, final norm, head and loss; the head's backward too, where there is one."""
        self._copy_out(self.outer.start is not None)
        at = self.clock.tick("forward/embedding")
        self.copied = at + self.traffic.copies
        for layer, unit in enumerate(self.layers):
            self._layer_forward(unit, decoder_layer(self.job, unit.layer or 0), layer)
        self.run.add(
            "hidden_states",
            self.run.stream,
            at,
            self.clock.now,
            "embeddings of the tokens",
            kind="temporary",
            formula="r*T*H",
        )
        self._rotations(at)
        if is_last(self.job):
            self._head()
            return
        self.returned = self.clock.now
        if self.job.gradients:
            self.begun = self.clock.tick("backward/received")

    def _copy_out(self, holds: bool) -> None:
        """An instant at which a unit is copied out, beside the buffer of the unit before."""
        if holds and self.traffic.copies:
            self.clock.tick("forward/gather")

    def _layer_forward(self, unit: Unit, layer: Layer, number: int) -> None:
        self._copy_out(holds=True)
        asked, start = self.clock.now, self.clock.now + 1
        recompute = self.job.gradients and self.checkpointed
        forward(
            self.run,
            layer,
            "forward",
            saves=self.job.gradients and not recompute,
            inside=recompute,
            blind=number == 0 and self._blind,
        )
        end = self.clock.now
        self.starts.append(start)
        self.made.append(layer)
        self._gathered(number, layer, asked, end)
        if self.job.engine.forward_prefetch and number + 1 < len(self.layers):
            self.traffic.ahead(self.layers[number + 1], start, end)

    def _gathered(self, number: int, layer: Layer, asked: int, end: int) -> None:
        """A layer's parameters, and the buffers that they arrive in: each lives until the next is copied out."""
        unit, root = self.layers[number], self.outer.root
        outer, inner = self.traffic.split(unit)
        if root and self.begins(number):
            self.traffic.flat(root, asked, asked)
        until = end + (root is None or not self.begins(number + 1))  # where the next is the root of another chunk
        at = next((number for number, step in enumerate(layer.steps, asked) if step.module == "experts"), end)
        arrivals = [(outer, asked, at if inner else until), *([(inner, at, until)] if inner else [])]
        self.flats += arrivals
        if self.traffic.copies:
            self.run.add("activations", self.run.stream, asked, asked, f"{unit.name}: its input", kind="temporary")
        later = not self.traffic.copies
        start = asked + later  # beside the buffer before, whose name the copy-out still holds (and gloo copies as much)
        if self.job.engine.reshard_after_forward:
            self.traffic.whole(outer, start, end)
            if inner:
                self.traffic.whole(inner, at + later, at + 1)
        elif not self.job.gradients:  # nothing gives it back before the next backward pass
            self.traffic.whole(unit, start, FOREVER)

    def begins(self, number: int) -> bool:
        """Whether this layer is the first of a later chunk of a pipeline's rank: a pass of its own, from root to root."""
        later = 0 < number < len(self.layers)
        return later and self.layers[number].layer != (self.layers[number - 1].layer or 0) + 1

    @property
    def _blind(self) -> bool:
        """Frozen embeddings: nothing asks for a gradient of the first layer's input, but a checkpoint (transformers does)."""
        lora = self.job.engine.lora
        frozen = lora is not None and is_first(self.job) and "embed_tokens" not in lora.extra_trainable
        return frozen and not self.checkpointed

    @property
    def checkpointed(self) -> bool:
        return self.job.engine.recompute.granularity != "none"

    def _rotations(self, at: int) -> None:
        """Cosines and sines, made once for all layers."""
        arch = self.job.architecture
        if arch.positions == "rope":
            rows = self.job.longest if not self.job.engine.packed else self.job.local_tokens
            width = arch.mla.qk_rope if arch.mla else arch.head_dim
            size = 2 * stream_in(self.job.engine) * rows * width
            self.run.add(
                "activations", size, at, at + FOREVER, "cosines and sines", kind="temporary", formula="2*r*T*D"
            )
        if not self.job.engine.packed and self.job.sequences > 1 and self.job.engine.attention in ("sdpa", "eager"):
            each = computes_in(self.job.engine) if self.job.engine.attention == "eager" else 1
            size = each * self.job.sequences * self.job.longest**2
            self.run.add(
                "attention_mask", size, at, at + FOREVER, "mask of queries and keys", kind="temporary", formula="B*S*S"
            )
        if self.job.beside_tokens:
            size = computes_in(self.job.engine) * self.job.longest**2
            label = "mask of responses that share a prompt"
            self.run.add("attention_mask", size, at, at + FOREVER, label, kind="temporary", formula="e*S*S")

    def _head(self) -> None:
        """Final norm, the hidden states it leaves, logits and loss, and with gradients their backward."""
        job = self.job
        self._ask("tail")
        if job.architecture.final_norm:
            module = "layernorm" if job.architecture.norm == "layernorm" else "norm"
            self.norm = Layer("final norm", [Step(module, "norm", starts=True)])
            forward(self.run, self.norm, "forward", saves=job.gradients)
        hidden = self.clock.now
        self._ask("head")
        rows = head_rows(job)
        vocab = -(-job.architecture.vocab // job.mesh.tp)
        self.run.lives += logits_lives(job, rows, vocab, self.clock, gathers=self.outer.regathers)
        self.begun = self._instant("head/backward") or self.clock.now
        self.returned = self._instant("entropy/forward" if inside(job) else "head/forward")
        self._hidden_states(hidden, rows)

    def _ask(self, outside: str) -> None:
        """The head's unit is gathered here, where it is of this kind."""
        if self.outer.tail is None or self.job.engine.outside != outside:
            return
        self._copy_out(holds=True)
        self.asked = self.clock.now if self.traffic.copies else self.clock.now + 1
        if outside == "tail":
            at, label = self.clock.now, "residual stream"
            self.run.add("activations", self.run.stream, at, at, label, kind="temporary", formula="r*T*H")

    def _hidden_states(self, at: int, rows: int) -> None:
        """What the decoder leaves, the rows of it that meet the head, and the gradient that comes back for them."""
        job, until = self.job, self.returned if self.traffic.copies and not self.job.gradients else self.begun
        size = computes_in(job.engine) * job.architecture.hidden
        whole, picks = size * job.local_tokens, rows < job.local_tokens
        last = at if picks and is_packed_loop(job.engine) else until
        kind = "activation" if job.gradients else "temporary"
        self.run.add("hidden_states", whole, at, last, "hidden states of all tokens", kind=kind, formula="e*T*H")
        if picks:
            label = "hidden states that meet the head"
            self.run.add("hidden_states", size * rows, at, until, label, kind=kind, formula="e*T*H")
        if job.gradients:
            label = "gradient of the head's input"
            pieces = inside(job) and job.engine.logits.chunk_tokens  # it grows chunk by chunk
            born = self._instant("loss/backward") if pieces else until
            self.run.add("grads", size * rows, born, until, label, kind="temporary", formula="e*T*H")

    def _instant(self, name: str) -> int:
        return next((index for index, one in enumerate(self.clock.names) if one == name), 0)
