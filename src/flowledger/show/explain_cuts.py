"""How a job is cut: the mesh and its axes, a cut of the batch beside a cut of sequences, and the schemes under every name."""

import re
from collections.abc import Iterator
from typing import Any

from flowledger.flow.axes import AXES, CUTS
from flowledger.flow.errors import folded
from flowledger.show.languages import Language, said
from flowledger.tables.operators import ASPECTS, Scheme, schemes

# Scheme -> what else it is called. Megatron's sequence parallelism comes first under SP: it is what that name was coined for.
NAMES = {
    "megatron_sp": ("SP", "sequence_parallel", "sequence_parallelism"),
    "ulysses": ("SP", "deepspeed_ulysses", "sequence_parallel", "sequence_parallelism"),
    "cp_ring": ("ring", "ring_attention", "context_parallel", "context_parallelism"),
    "cp_all_to_all": ("context_parallel", "context_parallelism"),
    "tp": ("plain_tp",),
}
# Axis -> names that lead to it as well.
AXIS_NAMES = {
    "dp": ("data_parallel", "data_parallelism"),
    "tp": ("tensor_parallel", "tensor_parallelism", "megatron_sp"),
    "pp": ("pipeline", "pipeline_parallel", "pipeline_parallelism"),
    "sp": ("ulysses", "deepspeed_ulysses", "sequence_parallel", "sequence_parallelism"),
    "cp": ("ring", "ring_attention", "cp_ring", "cp_all_to_all", "context_parallel", "context_parallelism"),
    "ep": ("expert_parallel", "expert_parallelism"),
}
MESH = (
    "The ranks of a job in a grid, one position along each axis: dp*tp*pp*cp*sp of them, for ep rides on dp. "
    "`show RUN mesh` says who holds what.",
    "把作业的 rank 排成网格，沿每个轴各有一个位置：共 dp*tp*pp*cp*sp 个，因为 ep 搭在 dp 上。`show RUN mesh` 回答谁持有什么。",
)
# Aspect -> what holds of a cut of the batch, and of a cut of sequences, each (English, Chinese).
TWO_CUTS: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "axes": (("dp", "dp"), ("sp, cp; Megatron SP, on the ranks of tp", "sp、cp；Megatron SP，在 tp 的 rank 上")),
    "changes": (
        ("how many samples run at once", "同时跑多少条样本"),
        ("how the tokens within a sample, or within a packed row, are shared out", "一条样本内部（或一个 packed 行内部）的 token 怎么切"),
    ),
    "shape": (
        ("[B, S, H] -> [B/dp, S, H]; packed: other rows, [1, T, H], of any length", "[B, S, H] -> [B/dp, S, H]；packed：不同的行 [1, T, H]，长度任意"),
        ("[B, S, H] -> [B, S/n, H]; packed: [1, T/n, H] of the same row on each of n ranks", "[B, S, H] -> [B, S/n, H]；packed：n 个 rank 各有同一行的 [1, T/n, H]"),
    ),
    "samples": (
        ("each sample whole, on one rank of dp", "每条样本完整地在一个 dp rank 上"),
        ("cp has a piece of every sample on each rank; sp and Megatron SP cut the packed row, so that a rank may have whole samples and none of others",
         "cp 下每个 rank 有每条样本的一段；sp 与 Megatron SP 切的是 packed 行，一个 rank 可能有几条完整的样本，而没有别的"),
    ),
    "travels": (
        ("gradients, and with FSDP parameters; nothing of a sample", "梯度，FSDP 下还有参数；样本的任何部分都不传"),
        ("activations, in every layer: a token attends to those on other ranks", "激活，每层都传：token 要看别的 rank 上的 token"),
    ),
    "sums": (
        ("loss is divided by the totals of the mini-batch over dp", "loss 除以 mini-batch 在 dp 上的总数"),
        ("the same samples on all ranks: count each once, sum its tokens over the ranks", "各 rank 是同样的样本：每条只数一次，token 在各 rank 上求和"),
    ),
    "confused": (
        ("mistaken for a sequence cut, log-probs [B/dp, S] meet a mask [B, S/n]: the element counts may even agree", "误当切序列时，log-prob [B/dp, S] 遇上 mask [B, S/n]：元素个数甚至可能相等"),
        ("mistaken for a batch cut, a sample is counted n times, or its neighbour's tokens are taken for its own", "误当切 batch 时，一条样本被数 n 次，或把相邻样本的 token 当成自己的"),
    ),
}  # fmt: skip
LABELS_ZH = {
    "axis": "轴", "axes": "轴", "changes": "影响", "shape": "形状", "samples": "样本", "travels": "传输", "sums": "求和", "confused": "混淆时",
}  # fmt: skip
TITLES = (("batch cut", "切 batch"), ("sequence cut", "切序列"))
CUT_NAMES = ("batch_cut", "sequence_cut")
COMPARISON = "batch-vs-sequence"
HEADING = re.compile(
    rf" (?:{'|'.join(AXES)}) \d+(?: \*)?$"
)  # what a heading says behind the scheme: axis, degree, * where it is not used


def facts(word: str, lang: Language) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a word means among cuts, each with its sort: the mesh, the two sorts of cuts, a scheme."""
    asked = _spelt(word)
    if asked == "mesh":
        axes = {axis: said(*CUTS[axis], lang) for axis in AXES}
        yield "mesh", {"what": "mesh", "name": "mesh", "meaning": said(*MESH, lang), "axes": axes}
    if asked in ("mesh", *map(_spelt, (COMPARISON, *CUT_NAMES))):
        yield "comparison", {"what": "comparison", "name": COMPARISON, **_side_by_side(lang)}
    yield from (("scheme", _scheme(scheme, word, lang)) for scheme in schemes_of(word))


def schemes_of(word: str) -> list[Scheme]:
    """The schemes that a word means, by a name or as a heading has them (`CP ring cp 2 *`)."""
    word = HEADING.sub("", word)
    return [one for one in schemes() if _spelt(word) in map(_spelt, (one.name, one.title, *NAMES[one.name]))]


def several(word: str, lang: Language) -> str | None:
    """`There are two: Megatron SP (on the ranks of tp) and Ulysses (axis sp).`, where a word means more than one scheme."""
    found = schemes_of(word)
    if len(found) < 2:
        return None
    named = said(" and ", "，", lang).join(f"{one.title} ({said('axis', '轴', lang)} {one.axis})" for one in found)
    return said(f"There are two that are called {word}: {named}.", f"叫 {word} 的有两种：{named}。", lang)


def axis_of(word: str) -> str | None:
    """The axis that a word means, by its own name or another."""
    asked = _spelt(word)
    return next((axis for axis in AXES if asked in (axis, *AXIS_NAMES[axis])), None)


def words() -> Iterator[str]:
    """Every name that is understood here."""
    yield from ("mesh", COMPARISON, *CUT_NAMES)
    for named in (NAMES, AXIS_NAMES):
        for name, others in named.items():
            yield from (name, *others)


def _spelt(word: str) -> str:
    return folded(word).replace(" ", "_")


def _side_by_side(lang: Language) -> dict[str, dict[str, str]]:
    titles = [said(*title, lang) for title in TITLES]
    return {
        aspect: {title: said(*text, lang) for title, text in zip(titles, both, strict=True)}
        for aspect, both in TWO_CUTS.items()
    }


def _scheme(row: Scheme, word: str, lang: Language) -> dict[str, Any]:
    texts = {aspect: said(*row.texts[aspect], lang) for aspect in ASPECTS}
    return {"what": "scheme", "name": row.title, "asked": word, "axis": row.axis, **texts}
