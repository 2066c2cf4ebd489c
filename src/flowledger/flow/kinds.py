"""Kinds of memory, and the one rule that gives an observed storage its kind."""

from collections.abc import Set

# kind -> (English, Chinese). The seven of the memory ledger, then the two that complete the sum.
KINDS: dict[str, tuple[str, str]] = {
    "param": ("model weights and their master copies", "模型权重及其主副本"),
    "grad": ("gradients, and the buffers they are reduced in", "梯度及其归约缓冲"),
    "optimizer": ("optimizer state: moment, variance", "优化器状态：一阶、二阶矩"),
    "activation": ("what forward saves for backward", "前向为反向保存的中间结果"),
    "kv_cache": ("keys and values of tokens already generated", "已生成 token 的键和值"),
    "comm_buffer": ("buffers made inside a collective", "集合通信内部的缓冲"),
    "temporary": (
        "short-lived tensors: masks, indices, losses in the making",
        "短生命周期张量：掩码、索引、损失中间量",
    ),
    "batch": ("data tensors that stages hand to each other", "各阶段之间传递的数据张量"),
    "residue": ("what no tensor explains: context, heap, fragmentation", "任何张量都解释不了的部分：上下文、堆、碎片"),
}

MEMORY_KINDS = ("param", "grad", "optimizer", "activation", "kv_cache", "comm_buffer", "temporary")

# Evidence -> kind, first match wins. The evidence is gathered by whoever watches (recorder or trace).
EVIDENCE: tuple[tuple[str, str], ...] = (
    ("parameter", "param"),  # a parameter, a buffer, or the master copy of one
    ("gradient", "grad"),  # `.grad` of a parameter, or a gradient buffer
    ("optimizer_state", "optimizer"),
    ("cache", "kv_cache"),  # held by a cache object
    ("collective", "comm_buffer"),  # made inside a collective
    ("stage_tensor", "batch"),  # an argument or a result of a stage
    ("saved_for_backward", "activation"),  # seen by the saved-tensor hooks
)


def classify(evidence: Set[str]) -> str:
    """The kind of a storage from what was seen of it; `temporary` when nothing was."""
    return next((kind for sign, kind in EVIDENCE if sign in evidence), "temporary")
