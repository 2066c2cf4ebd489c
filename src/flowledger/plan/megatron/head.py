"""The last pipeline stage beyond its layers: final norm, output head, loss, and multi-token-prediction heads."""

from dataclasses import replace

from flowledger.plan.logits import logits_lives
from flowledger.plan.megatron.layers import saved
from flowledger.plan.megatron.rank import Rank
from flowledger.plan.saved import kept, total
from flowledger.plan.timeline import Clock, Live

NEVER = 10**9
LINEAR = "megatron/core/tensor_parallel/layers.py LinearWithGradAccumulationAndAsyncCommunication"
FUSED = "megatron/core/fusions/fused_cross_entropy.py: its compiled steps do not work in place (golden runs)"


def head_lives(rank: Rank, clock: Clock) -> list[Live]:
    """Ticks the instants of head and loss, and returns what lives over them."""
    job = rank.job
    if job.head == "none":
        return []
    start = clock.now + 1
    rows = _rows(rank)
    found = list(logits_lives(job, rows, rank.value("V"), clock))
    at = {name: index for index, name in enumerate(clock.names) if index >= start}
    if job.head == "value":
        return found
    return found + [live for live in _beside(rank, at, rows) if live.bytes]


def _beside(rank: Rank, at: dict[str, int], rows: int) -> list[Live]:
    """What Megatron's head and loss need beside logits: compiled steps, gradients of weight and input, put-off ones."""
    e, vocab, hidden = rank.value("e"), rank.value("V"), rank.value("H")
    found = []
    if rank.flags.native_loss:
        loss = at["loss/forward"]
        found.append(
            _temporary("logits", 4 * rows * vocab, (loss, loss), "exponentials beside the logits", "4*T*V", FUSED)
        )
    if not rank.job.gradients:
        return found
    span = (at["head/backward"], at["head/backward"])
    if not rank.job.engine.gradient_accumulation_fusion:
        found.append(_temporary("grads", e * vocab * hidden, span, "gradient of the head's weight", "e*V*H", LINEAR))
    found.append(
        _temporary("grads", e * rank.value("T") * hidden, span, "gradient of the head's input", "e*T*H", LINEAR)
    )
    if rank.flags.deferred:
        number = min(rank.flags.deferred, max(1, rank.job.micro_batches))
        label = "gradients and inputs of the head whose weight gradient is put off"
        one = _temporary("grads", e * rows * (vocab + hidden), (0, NEVER), label, "e*T*(V + H)", LINEAR)
        found.append(replace(one, count=number))
    return found


def _temporary(name: str, bytes_: int, span: tuple[int, int], label: str, formula: str, source: str) -> Live:
    return Live(
        name=name, kind="temporary", bytes=bytes_, born=span[0], dies=span[1], label=label, formula=formula, source=source,
    )  # fmt: skip


def final_norm(rank: Rank) -> int:
    """Bytes that the norm in front of the head keeps."""
    rows = [kept("te", module, rank.symbols, rank.words - {"recompute_layernorm"}) for module in ("norm", "bert_head")]
    return sum(total(each) for each in rows)


def mtp_lives(rank: Rank, born: int, dies: int) -> list[Live]:
    """Layers that predict further tokens: each a layer of its own, two norms, a joint projection, and logits whose
    softmax stays until backward."""
    arch = rank.job.architecture
    if not arch.mtp_layers or not rank.job.gradients:
        return []
    e, tokens, hidden = rank.value("e"), rank.value("U"), rank.value("H")
    layer = total(saved(rank, arch.layers - 1)) + 6 * e * tokens * hidden + 3 * final_norm(rank)
    wide = 2 if rank.job.engine.logits.cross_entropy == "te" else 4
    return [
        Live(
            name="activations", kind="activation", bytes=layer, count=arch.mtp_layers, born=born, dies=dies,
            label="multi-token-prediction layer", formula="layer + 6*e*U*H + 3 norms",
            source="megatron/core/transformer/multi_token_prediction.py",
        ),
        Live(
            name="logits", kind="activation", bytes=wide * _rows(rank) * rank.value("V"), count=arch.mtp_layers,
            born=born, dies=dies, label="softmax of multi-token-prediction logits", formula="4*T*V",
            source="megatron/core/transformer/multi_token_prediction.py",
        ),
    ]  # fmt: skip


def _rows(rank: Rank) -> int:
    limit = rank.job.logit_tokens
    rows = rank.value("T")
    return rows if limit is None else min(rows, -(-limit // (rank.job.mesh.cp * rank.job.mesh.sp)))
