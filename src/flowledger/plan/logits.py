"""What is as wide as the vocabulary: logits, log-probs, entropy and their gradients, from the output head to the loss.

Which tensors exist together depends on who computes the loss. `implementation` names that from `Engine.logits`; the
rows of tables/activations_logits.toml say of each name what lives over which instants.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from flowledger.config.engine import Engine
from flowledger.plan.arithmetic import integer
from flowledger.plan.job import ITEMSIZE, Job
from flowledger.plan.timeline import Clock, Live, Timeline
from flowledger.tables.constants import constant

FORWARD = ("head/forward", "logits/forward", "loss/forward", "entropy/forward")
GATHER = "head/gather"
WITH_ITS_NAME = 10**8  # the micro-batch ends before
BACKWARD = ("entropy/backward", "loss/backward", "logits/backward", "head/backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One tensor of one implementation, and the instants it lives over."""

    implementation: str
    label: str
    bytes: str
    born: str
    dies: str
    when: tuple[str, ...] = ()
    named: bool = False  # a trainer's name keeps it
    saved: bool = False  # and so does backward, until it dies
    source: str = ""

    def holds(self, flags: frozenset[str]) -> bool:
        return all((flag[1:] not in flags) if flag.startswith("!") else flag in flags for flag in self.when)


def logits_lives(
    job: Job, rows: int, vocab: int, clock: Clock, *, outputs_kept: bool | None = None, gathers: bool = False
) -> list[Live]:
    """The vocabulary-wide tensors [rows, vocab] of head and loss, both local to this rank.

    Ticks `head/forward`, `logits/forward` (casts, temperature), `loss/forward`, `entropy/forward`, and with gradients
    `entropy/backward`, `loss/backward`, `logits/backward`, `head/backward`. The gradient of the head's weight is the
    caller's, but for what an implementation holds beside it. `Logits.upcast` alone is a copy that stays referenced
    (18 bytes an element at most in bfloat16), with `dtype = float32` one that only the loss function holds (14), and
    `dtype = float32` alone replaces the logits (16). `outputs_kept`: false where the model's output goes out of scope
    once the loss is there (a `compute_loss` that returns the loss alone): 2 to 6 bytes an element less in backward; else
    they live on after `head/backward`. `gathers`: backward gathers the head first, at an instant `head/gather`. The
    entropy beside flash-attn's cross-entropy is taken as compiled unless `job.environment` has TORCHDYNAMO_DISABLE=1.
    """
    instants = _instants(job, gathers)
    at = {name: clock.tick(name) for name in instants}
    if job.head == "none" or rows <= 0:
        return []
    how, flags = implementation(job), _flags(job)
    symbols = _symbols(job, rows, vocab, how)
    last, kept = clock.now, job.engine.logits.kept if outputs_kept is None else outputs_kept
    return [
        Live(
            name="values" if how == "value" else "grads" if "gradient" in row.label else "logits",
            kind="temporary",
            bytes=integer(row.bytes, symbols),
            born=at[row.born],
            dies=_death(row, job, kept, at, last),
            label=row.label,
            formula=row.bytes,
            source=row.source,
        )
        for row in table()
        if row.implementation == how and row.holds(flags) and row.born in at and integer(row.bytes, symbols)
    ]


def _instants(job: Job, gathers: bool) -> tuple[str, ...]:
    """Backward asks for the head where it meets the output of the model: logits, or the loss that is made inside."""
    if not job.gradients:
        return FORWARD
    if not gathers:
        return (*FORWARD, *BACKWARD)
    if inside(job):
        return (*FORWARD, GATHER, *BACKWARD)
    return (*FORWARD, *BACKWARD[:-1], GATHER, BACKWARD[-1])


def _death(row: Row, job: Job, kept: bool, at: Mapping[str, int], last: int) -> int:
    """Megatron's schedules empty a stage's output themselves; others leave it to the names that hold it."""
    if row.named and job.gradients and job.engine.strategy != "megatron":
        if kept:
            return WITH_ITS_NAME
        return at[row.dies] if row.saved else at["entropy/forward"]
    return at.get(row.dies, last)


def inside(job: Job) -> bool:
    """Whether the loss is computed within the model's forward, where the head's weight is."""
    if is_own(job.engine) and job.engine.strategy == "fsdp2":
        return True  # flowledger runs what needs the model's parameters as one forward pass
    return job.head == "lm" and implementation(job) in ("chunked", "own_chunked", "fused")


def logits_peak(job: Job, rows: int, vocab: int, *, outputs_kept: bool | None = None) -> int:
    """Bytes of these tensors at their fullest instant."""
    clock = Clock()
    lives = logits_lives(job, rows, vocab, clock, outputs_kept=outputs_kept)
    return Timeline(tuple(clock.names), tuple(lives)).peak().bytes


def implementation(job: Job) -> str:
    """The name of the implementation in the table: value, own, own_chunked, plain, pieces, flash, te, parallel, …"""
    engine, logits = job.engine, job.engine.logits
    if job.head == "value":
        return "value"
    if logits.implementation == "fused":
        return "chunked" if logits.chunk_tokens else "fused"
    if is_own(engine):
        return "own_chunked" if 0 < (logits.chunk_tokens or 0) < head_rows(job) else "own"  # one chunk is computed once
    if logits.implementation == "chunked":
        return "chunked"
    if logits.cross_entropy == "plain" and logits.chunk_tokens:
        return "pieces"
    return logits.cross_entropy


def is_own(engine: Engine) -> bool:
    """flowledger's own loop: float32 logits over a temperature, with an entropy that is a by-product of the log-probs."""
    logits = engine.logits
    return (
        engine.strategy in ("single", "ddp", "fsdp2")
        and logits.dtype == "float32"
        and logits.temperature_copy
        and logits.entropy == "full"
        and logits.cross_entropy == "plain"
        and not logits.upcast
    )


def head_rows(job: Job) -> int:
    """Tokens of one micro-batch that meet the output head on this rank."""
    return job.local_tokens if job.logit_tokens is None else min(job.logit_tokens, job.local_tokens)


def chunk_rows(job: Job, rows: int, vocab: int, how: str) -> int:
    """Rows of one chunk: as configured, else the implementation's own choice.

    Liger takes the power of two at or above rows / ceil(vocab / hidden), so that a chunk of logits is about as large as
    the hidden states (Liger-Kernel ops/fused_linear_cross_entropy.py).
    """
    logits = job.engine.logits
    if how == "fused":
        share = -(-rows // -(-vocab // job.architecture.hidden))
        return min(rows, 1 << max(0, share - 1).bit_length())
    if logits.chunk_tokens:
        return min(rows, logits.chunk_tokens)
    if logits.entropy == "chunked":
        return min(rows, int(constant("entropy_chunk_rows")))
    return rows


def written(engine: Engine) -> int:
    """Bytes of one number as the output head writes it."""
    return ITEMSIZE.get(engine.compute_dtype or engine.param_dtype, 2)


def _flags(job: Job) -> frozenset[str]:
    logits = job.engine.logits
    narrow = written(job.engine) < 4
    single = logits.dtype == "float32"
    flags = {
        "grad": job.gradients,
        "named": narrow and logits.upcast and not single,
        "passing": narrow
        and ((logits.upcast and single) or (job.engine.autocast and not logits.upcast and not single)),
        "recast": narrow and single and not logits.upcast,
        "temperature": logits.temperature_copy,
        "entropy": logits.entropy != "none",
        "entropy_chunked": logits.entropy == "chunked",
        "entropy_grad": logits.entropy_grad,
        "compiled": ("TORCHDYNAMO_DISABLE", "1") not in job.environment,
    }
    always = logits.cross_entropy == "parallel" and narrow  # it casts for itself
    flags["converted"] = always or any(flags[name] for name in ("named", "passing", "recast", "temperature"))
    return frozenset(name for name, held in flags.items() if held)


def _symbols(job: Job, rows: int, vocab: int, how: str) -> dict[str, object]:
    flags, e = _flags(job), written(job.engine)
    wide = flags & {"named", "passing", "recast"} or job.engine.logits.dtype == "float32"
    return {
        "T": rows,
        "V": vocab,
        "H": job.architecture.hidden,
        "C": chunk_rows(job, rows, vocab, how),
        "e": e,
        "x": 4 if wide else e,
    }


@cache
def table() -> tuple[Row, ...]:
    """Every row of tables/activations_logits.toml."""
    text = (files("flowledger.tables") / "activations_logits.toml").read_text(encoding="utf-8")
    return tuple(Row(**{**raw, "when": tuple(raw.get("when", ()))}) for raw in tomllib.loads(text)["logits"])
