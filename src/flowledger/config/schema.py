"""RunConfig: the one typed form of what a run is asked to do. Frozen, and checked at birth.

Units stand in the names: `mini_batch_prompts` counts prompts, `max_response_tokens` tokens, `timeout_s` seconds.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from flowledger.config import agreement, passes
from flowledger.config.algorithm import AGGREGATIONS as AGGREGATIONS
from flowledger.config.algorithm import Algorithm
from flowledger.config.bounds import (
    BYTES,
    COUNT,
    LONGEST_NAME,
    NAME,
    SECONDS,
    SIZE,
    STEP_TOKENS,
    TINY_PARAMETERS,
    TOKENS,
    WEIGHT,
    Beta,
    File,
)
from flowledger.config.engine import Engine, Hardware, Lora, Mesh, Serving
from flowledger.config.reward import Component as Component
from flowledger.config.reward import Reward
from flowledger.config.section import Section


class Tiny(Section):
    """Sizes of the model that is made on the spot when `model.path` is `tiny`."""

    hidden_size: int = Field(64, ge=8, le=SIZE)  # H
    layers: int = Field(2, ge=1, le=1024)  # L
    heads: int = Field(4, ge=1, le=SIZE)  # A
    kv_heads: int = Field(2, ge=1, le=SIZE)  # K
    ffn_size: int = Field(128, ge=8, le=SIZE)  # F; of each expert where there are several
    experts: int | None = Field(None, ge=2, le=SIZE)  # E; null: one feed-forward a layer, no router
    experts_per_token: int = Field(2, ge=1, le=SIZE)

    @model_validator(mode="after")
    def _heads_divide(self) -> "Tiny":
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size = {self.hidden_size} is not divisible by heads = {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} is not divisible by kv_heads = {self.kv_heads}")
        if self.experts and self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token = {self.experts_per_token} of experts = {self.experts}; use at most {self.experts}"
            )
        feed_forward = 3 * self.ffn_size * (self.experts or 1)
        parameters = self.layers * self.hidden_size * (4 * self.hidden_size + feed_forward)
        if parameters > TINY_PARAMETERS:
            raise ValueError(
                f"these sizes make a model of about {parameters:.1e} weights; at most {TINY_PARAMETERS:.1e}"
            )
        return self


class Model(Section):
    """The policy: `tiny`, `smollm2-135m`, a directory in Hugging Face form, or a `.gguf` file."""

    path: File = "tiny"
    dtype: Literal["float32", "bfloat16"] = "float32"
    tiny: Tiny = Tiny()
    lora: Lora | None = None


class Data(Section):
    """Where prompts come from: a reasoning-gym task, or a JSONL or Parquet file."""

    task: str | None = None  # name of a reasoning-gym task
    task_options: dict[str, Any] = Field(default_factory=dict)
    path: File | None = None  # .jsonl or .parquet
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    prompts_per_step: int = Field(4, ge=1, le=2**20)  # B_prompt
    max_prompt_tokens: int = Field(256, ge=1, le=TOKENS)
    too_long: Literal["error", "skip", "truncate_left"] = "error"
    chat_template: bool = True
    system_prompt: str | None = None
    shuffle: bool = True

    @model_validator(mode="after")
    def _one_source(self) -> "Data":
        if (self.task is None) == (self.path is None):
            raise ValueError("give exactly one of data.task (a reasoning-gym task) and data.path (.jsonl or .parquet)")
        return self


class Rollout(Section):
    """How responses are sampled."""

    samples_per_prompt: int = Field(4, ge=1, le=2**16)  # G
    max_response_tokens: int = Field(32, ge=1, le=TOKENS)
    temperature: float = Field(1.0, gt=0, le=WEIGHT)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=COUNT)  # 0: off
    stop_token_ids: tuple[Annotated[int, Field(ge=0, lt=COUNT)], ...] = ()  # beside the tokenizer's end-of-sequence
    max_running: int | None = Field(None, ge=1, le=COUNT)  # slots of the KV cache; null: all samples at once
    timeout_s: float | None = Field(None, ge=0, le=SECONDS)  # per sample, from its admission
    abort_function: File | None = None  # module:name or file.py:name, (sample_id, response_ids) -> bool
    environment: File | None = None  # module:name or file.py:name, answers each turn of a response (tools, users)
    max_turns: int = Field(1, ge=1, le=COUNT)  # turns of the policy in one response; more than 1 needs `environment`
    log_probs: bool = True  # the engine returns the log-prob of each token it samples
    serving: Serving = Serving()
    weights: Literal["copy", "shared"] = "copy"  # a copy of the policy, or the policy itself


class MicroBatch(Section):
    """When a micro-batch closes: on the first limit hit. Only `samples` given: static micro-batches of that size."""

    samples: int | None = Field(None, ge=1, le=COUNT)
    max_tokens: int | None = Field(None, ge=1, le=STEP_TOKENS)  # tokens without padding
    max_padded_tokens: int | None = Field(None, ge=1, le=STEP_TOKENS)  # samples * longest sample
    max_bytes: int | None = Field(None, ge=1, le=BYTES)  # estimated activation bytes
    balance: bool = True  # Karmarkar-Karp where dynamic

    @property
    def dynamic(self) -> bool:
        return bool(self.max_tokens or self.max_padded_tokens or self.max_bytes)


class Actor(Section):
    """The update of the policy."""

    epochs: int = Field(1, ge=1, le=2**20)  # ppo_epochs
    mini_batch_prompts: int | None = Field(None, ge=1, le=2**20)  # prompts of one optimizer step; null: all of the step
    mini_batch_samples: int | None = Field(None, ge=1, le=COUNT)  # the same in samples, where a framework counts those
    micro_batch: MicroBatch = MicroBatch(samples=4)
    packed: bool = True  # no padding in forward passes
    shared_prompts: bool = True  # packed passes hold a prompt once for its neighbouring responses
    log_prob_chunk_tokens: int = Field(1024, ge=0, le=COUNT)  # logits computed at once; 0: all of the micro-batch
    activation_checkpointing: bool = False
    grad_clip: float = Field(1.0, ge=0, le=1e9)  # 0: off
    engine: Engine = Engine()
    # A pass of its own; false: the update's first log-probs or the rollout's stand in for it; null: where that is exact.
    old_log_prob: bool | None = None
    log_prob_micro_batch: MicroBatch | None = None  # of the old_log_prob pass; null: as the update
    log_prob_entropy: Literal["none", "full", "chunked"] = "none"  # the old_log_prob pass computes entropy too


class Ref(Section):
    """The reference policy: the start model (`start`) or another, kept frozen."""

    path: File = "start"
    engine: Engine | None = None  # null: as the actor's
    micro_batch: MicroBatch | None = None  # null: as the old_log_prob pass


class Critic(Section):
    """A value model (for estimators that need one)."""

    path: File = "start"
    lr: float = Field(1e-5, gt=0, le=WEIGHT)
    clip_value: float = Field(0.5, gt=0, le=WEIGHT)  # how far a value may move from the old one in the loss
    grad_clip: float = Field(1.0, ge=0, le=1e9)  # 0: off
    warmup_steps: int = Field(0, ge=0, le=COUNT)  # steps of the run in which only the critic learns
    epochs: int | None = Field(None, ge=1, le=2**20)  # null: as the actor's
    mini_batch_prompts: int | None = Field(None, ge=1, le=2**20)  # null: as the actor's
    engine: Engine | None = None  # null: as the actor's
    micro_batch: MicroBatch | None = None  # of the update; null: as the actor's
    values_micro_batch: MicroBatch | None = None  # of the values pass; null: as the update's


class Optim(Section):
    """AdamW."""

    lr: float = Field(1e-5, ge=0, le=WEIGHT)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0, le=1)
    weight_decay: float = Field(0.0, ge=0, le=WEIGHT)
    warmup_steps: int = Field(0, ge=0, le=COUNT)  # in steps of the run, linear from lr / (warmup_steps + 1)


class Memory(Section):
    """The limit that a peak is held against; null: what the machine reports."""

    limit_bytes: int | None = Field(None, ge=1, le=BYTES)


class Checkpoint(Section):
    """Write the policy every so many steps."""

    every_steps: int = Field(1, ge=1, le=COUNT)
    path: File | None = None  # null: beside the run


class Async(Section):
    """How far rollout may run ahead of training (used by planned frameworks; the loop itself is synchronous)."""

    mode: Literal["sync", "one_step_off", "fully_async"] = "sync"
    max_staleness: float = Field(0, ge=0, le=COUNT)


class Record(Section):
    """What the recorder writes."""

    level: Literal["off", "steps", "tensors", "tokens"] = "tensors"
    ops_every: int = Field(50, ge=0, le=COUNT)  # step 0 and every so many steps operator by operator; 0: never
    groups: int = Field(1, ge=0, le=COUNT)  # groups per step whose tokens are written at level `tokens`
    queue_rows: int = Field(
        100_000, ge=100, le=10**8
    )  # rows that may wait for the writer; more are dropped and counted
    memory_history: int = Field(0, ge=0, le=10**8)  # allocations and releases a GPU's allocator remembers; 0: none
    hang_after_s: float = Field(300.0, ge=0, le=COUNT)  # that a rank may wait for one that does not get on; 0: for ever


class RunConfig(Section):
    """Everything one run is asked to do. `source_of` says of each key where its value came from."""

    name: str = Field("run", pattern=NAME, max_length=LONGEST_NAME)
    steps: int = Field(2, ge=1, le=COUNT)
    seed: int = Field(0, ge=0, lt=2**63)
    threads: int | None = Field(None, ge=1, le=1024)  # torch threads; null: torch's own choice
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU for each process where there are enough, else the CPU
    framework: str = "flowledger"
    framework_version: str | None = None
    raw: dict[str, Any] = Field(default_factory=dict)  # a foreign framework's own dictionary
    model: Model = Model()
    data: Data
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    algorithm: Algorithm = Algorithm()
    actor: Actor = Actor()
    critic: Critic | None = None
    ref: Ref | None = None
    optim: Optim = Optim()
    mesh: Mesh = Mesh()
    hardware: Hardware = Hardware()
    memory: Memory = Memory()
    checkpoint: Checkpoint | None = None
    async_: Async | None = Field(None, alias="async")
    record: Record = Record()

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def samples_per_step(self) -> int:
        """B = B_prompt * G."""
        return self.data.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def mini_batch_prompts(self) -> int:
        """Prompts of one optimizer step, rounded up where it is given in samples."""
        samples = self.actor.mini_batch_samples
        prompts = self.actor.mini_batch_prompts or self.data.prompts_per_step
        return prompts if samples is None else -(-samples // self.rollout.samples_per_prompt)

    @property
    def mini_batch_samples(self) -> int:
        """Samples of one optimizer step, over all data-parallel ranks."""
        return self.actor.mini_batch_samples or self.mini_batch_prompts * self.rollout.samples_per_prompt

    @property
    def old_log_prob_pass(self) -> bool:
        """Whether old log-probs come from a forward pass of their own."""
        if self.framework != agreement.OWN:
            return self.actor.old_log_prob is not False
        return passes.old_log_prob_pass(self)

    @property
    def bypasses(self) -> bool:
        """Whether the rollout's log-probs stand in for the old policy's."""
        return self.algorithm.policy_loss == passes.BYPASS

    @property
    def policy_starts(self) -> int:
        """The first step in which the policy learns: before it, a critic may warm up."""
        return self.critic.warmup_steps if self.critic else 0

    def needs(self, name: str) -> bool:
        """Whether the chosen estimator or loss needs this: critic, group, baseline, sum_pi_squared, …"""
        return name in passes.needs(self)

    def source_of(self, key: str) -> str:
        """`examples/tiny.yaml:12`, `command line`, or `default@<version>` for a dotted key."""
        parts = key.split(".")
        prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        found = [self._sources[prefix] for prefix in prefixes if prefix in self._sources]
        within = [source for name, source in self._sources.items() if name.startswith(f"{key}.")]
        return next(iter([*found, *within]), f"default@{VERSION}")

    @model_validator(mode="after")
    def _sections_agree(self) -> "RunConfig":
        agreement.check(self)
        return self


VERSION = "0.1.0"
