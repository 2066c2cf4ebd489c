"""Activations of the layers of one rank: what one micro-batch leaves behind in each, and what backward needs beside."""

from flowledger.plan.megatron.rank import Rank
from flowledger.plan.saved import Kept, kept, total

TABLE = "te"  # both implementations keep the same tensors; rows of `local` come on top


def saved(rank: Rank, layer: int) -> list[Kept]:
    """What a layer keeps from forward to backward when nothing of it is recomputed in full."""
    return _rows(rank, layer, "saved")


def halves(rows: list[Kept]) -> tuple[list[Kept], list[Kept]]:
    """The rows of the feed-forward half of a layer, whose backward comes first, and of the attention half.

    The second of the norms and of the dropout masks belongs to the feed-forward.
    """
    own = {"mlp", "moe"}
    seen: dict[str, int] = {}
    second: list[Kept] = []
    first: list[Kept] = []
    for one in rows:
        key = f"{one.row.module}/{one.row.label}"
        seen[key] = seen.get(key, 0) + 1
        (second if one.row.module in own or seen[key] > 1 else first).append(one)
    return second, first


def backward(rank: Rank, layer: int, feed_forward: bool) -> list[Kept]:
    """What the backward of one half of a layer has alive beside what was saved."""
    half = modules(rank, layer)[feed_forward]
    return [one for name in ("block", *half) for one in _of(rank, name, "backward")] if half else []


def checkpoints(rank: Rank, layers: tuple[int, ...]) -> tuple[set[int], set[int]]:
    """(layers that are recomputed in full, those of them whose input is kept) under full recomputation."""
    plan = rank.job.engine.recompute
    if plan.granularity != "full":
        return set(), set()
    number = plan.layers or 1
    if plan.method == "block":
        chosen = set(layers[:number])
        return chosen, chosen
    return set(layers), set(layers[::number])


def unit(rank: Rank, layers: tuple[int, ...], layer: int) -> tuple[int, ...]:
    """The layers that are replayed together with one: --recompute-num-layers with the uniform method."""
    plan = rank.job.engine.recompute
    if plan.method == "block":
        return (layer,)
    number, place = plan.layers or 1, layers.index(layer)
    start = place // number * number
    return layers[start : start + number]


def layer_bytes(rank: Rank, layers: tuple[int, ...]) -> int:
    """Bytes that one micro-batch leaves behind in these layers."""
    full, inputs = checkpoints(rank, layers)
    boundary = rank.value("e") * rank.value("U") * rank.value("H")
    return sum(total(saved(rank, layer)) for layer in layers if layer not in full) + boundary * len(inputs)


def modules(rank: Rank, layer: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The modules of a layer in order: those of the mixer, those of the feed-forward; () for what it lacks."""
    arch = rank.job.architecture
    attention = ("mla", "core") if arch.mla is not None else ("attention", "core")
    inner = ("linear",) if arch.kind(layer) == "linear" else attention
    mixer = ("norm", *inner, "projection") if arch.has_mixer(layer) else ()
    forward = ("norm", "moe" if rank.is_moe(layer) else "mlp", "projection") if arch.has_feed_forward(layer) else ()
    return mixer, forward


def _rows(rank: Rank, layer: int, life: str) -> list[Kept]:
    names = tuple(name for half in modules(rank, layer) for name in half)
    return [one for name in names for one in _of(rank, name, life)]


def _of(rank: Rank, module: str, life: str) -> list[Kept]:
    """The rows of one module on this rank; all layers of a kind have the same, so they are evaluated once."""
    known = rank.memo.get((module, life))
    if known is None:
        kernels = (TABLE, "local") if rank.job.engine.kernels == "local" else (TABLE,)
        known = [one for kernel in kernels for one in kept(kernel, module, rank.symbols, rank.words, life=life)]
        rank.memo[module, life] = known
    return known
