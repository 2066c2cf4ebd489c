"""The forward pass of one micro-batch in instants: embedding, layers, final norm, head and loss."""

from flowledger.plan.fsdp.layers import Layer, Pass, decoder_layer, forward
from flowledger.plan.fsdp.state import units
from flowledger.plan.fsdp.steps import Step
from flowledger.plan.fsdp.symbols import computes_in, is_packed_loop, stream_in
from flowledger.plan.fsdp.traffic import Traffic
from flowledger.plan.fsdp.units import Unit, is_first, is_last, layer_units, outer_units
from flowledger.plan.job import Job
from flowledger.plan.logits import logits_lives
from flowledger.plan.timeline import Clock


class Forward:
    """One timeline while its forward pass is written."""

    def __init__(self, job: Job, variant: str = "") -> None:
        self.job, self.clock = job, Clock()
        self.first, self.last = outer_units(job)
        self.units, self.layers = units(job), layer_units(job)
        variant = variant or ("compiled" if job.engine.compile else "")
        self.run, self.traffic = Pass(job, self.clock, variant), Traffic(job)
        self.made: list[Layer] = []
        self.boundaries: list[int] = []  # instant at which each layer's input was kept by a checkpoint
        self.starts: list[int] = []  # first instant of each layer's forward
        self.norm: Layer | None = None
        self.begun = 0  # first instant of the backward pass
        self.ends: list[tuple[Unit, int]] = []  # when each unit's gradients were reduced
        self.direct: list[tuple[str, int, int]] = []  # gradients that no reduction cuts: label, bytes, birth

    def forward(self) -> None:
        """Embedding, layers, final norm, head and loss; the head's backward too, where there is one."""
        at = self.clock.tick("forward/embedding")
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
        elif self.job.gradients:
            self.begun = self.clock.tick("backward/received")

    def _layer_forward(self, unit: Unit, layer: Layer, number: int) -> None:
        start = self.clock.now + 1
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
        held = end if self.job.engine.reshard_after_forward or not self.job.gradients else -1
        self.starts.append(start)
        self.made.append(layer)
        if held >= 0:
            self.traffic.whole(unit, start, held)
        self.traffic.flat(unit, start, end + 1)
        if self.job.engine.forward_prefetch and number + 1 < len(self.layers):
            self.traffic.ahead(self.layers[number + 1], start, end)

    @property
    def _blind(self) -> bool:
        """Frozen embeddings: nothing asks for a gradient of the first layer's input."""
        lora = self.job.engine.lora
        return lora is not None and is_first(self.job) and "embed_tokens" not in lora.extra_trainable

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
            self.run.add("activations", size, at, at + 10**8, "cosines and sines", kind="temporary", formula="2*r*T*D")
        if not self.job.engine.packed and self.job.sequences > 1 and self.job.engine.attention in ("sdpa", "eager"):
            each = computes_in(self.job.engine) if self.job.engine.attention == "eager" else 1
            size = each * self.job.sequences * self.job.longest**2
            self.run.add(
                "attention_mask", size, at, at + 10**8, "mask of queries and keys", kind="temporary", formula="B*S*S"
            )

    def _head(self) -> None:
        """Final norm, the hidden states it leaves, logits and loss, and with gradients their backward."""
        job, before = self.job, self.clock.now
        if job.architecture.final_norm:
            module = "layernorm" if job.architecture.norm == "layernorm" else "norm"
            self.norm = Layer("final norm", [Step(module, "norm", starts=True)])
            forward(self.run, self.norm, "forward", saves=job.gradients)
        hidden = self.clock.now
        rows = job.local_tokens if job.logit_tokens is None else min(job.logit_tokens, job.local_tokens)
        vocab = -(-job.architecture.vocab // job.mesh.tp)
        self.run.lives += logits_lives(job, rows, vocab, self.clock)
        self.begun = self._instant("head/backward") or self.clock.now
        self._hidden_states(hidden, rows)
        if self.last:
            self._head_unit(self.last, before + 1)

    def _hidden_states(self, at: int, rows: int) -> None:
        """What the decoder leaves, the rows of it that meet the head, and the gradient that comes back for them."""
        job, until = self.job, self.begun
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
            self.run.add("grads", size * rows, until, until, label, kind="temporary", formula="e*T*H")

    def _instant(self, name: str) -> int:
        return next((index for index, one in enumerate(self.clock.names) if one == name), 0)

    def _head_unit(self, unit: Unit, start: int) -> None:
        """Final norm and head are one unit that is not given back between forward and backward."""
        if self.one_root:
            return
        self.traffic.whole(unit, start, self.begun)
        self.traffic.flat(unit, start, self.begun)  # the next copy-out is that of the first layer in backward

    @property
    def one_root(self) -> bool:
        """Embedding, final norm and head in one unit, gathered for the whole pass: FSDP1, and wherever they are tied."""
        return self.job.architecture.tied or self.job.engine.strategy != "fsdp2"
