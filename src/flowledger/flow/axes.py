"""The axes of the device mesh: what each cuts, what it is easily confused with, and how they make up the ranks of a job.

The same ranks are counted in two ways. Dense weights see pp*dp*cp*sp*tp. Experts see pp*edp*ep, and inside of ep the ranks
that have the same experts. In flowledger's own loop these are cp*sp*tp: of each `ep` neighbouring dp ranks every one holds
other experts, and edp is what dp leaves (dp = edp*ep). Megatron folds: inside of ep are only the etp ranks that cut each expert
between them, ep lies over tp, cp and dp alike, and edp is what it leaves of a pipeline stage (dp*cp*sp*tp = edp*ep*etp).
"""

AXES = ("dp", "tp", "pp", "sp", "cp", "ep")
DEGREES = (*AXES, "etp")  # that a mesh is known by: with etp experts are folded, without it they ride on dp

# Slowest first: neighbouring ranks differ in tp, which talks the most.
DENSE = ("pp", "dp", "cp", "sp", "tp")
EXPERT = ("pp", "edp", "ep", "cp", "sp", "tp")

# Axes that are several of EXPERT at once, counted row by row, where ep rides on dp.
JOINED: dict[str, tuple[str, ...]] = {
    "dp": ("edp", "ep"),
    "tokens": ("cp", "sp"),  # hold slices of the same samples
    "shards": ("edp", "ep", "cp", "sp"),  # FSDP cuts dense parameters over them
    "expert_shards": ("edp", "cp", "sp"),  # FSDP cuts the experts of one ep rank over them
}

# axis -> (English, Chinese)
CUTS: dict[str, tuple[str, str]] = {
    "dp": (
        "Cuts the batch: each rank runs other samples. FSDP shards parameters, gradients and optimizer state on it.",
        "切 batch：各 rank 跑不同的样本。FSDP 还在该轴上切参数、梯度与优化器状态。",
    ),
    "tp": (
        "Cuts heads and linear weights. Megatron's sequence parallelism (SP) rides on this axis: between the blocks "
        "(norm, residual) activations are cut along the sequence over the same ranks; it has no degree of its own.",
        "切注意力头与线性层权重。Megatron 的序列并行（SP）搭在该轴上："
        "在块之间（norm、残差）激活沿序列切到同一组 rank；它没有自己的并行度。",
    ),
    "pp": (
        "Cuts layers: the tensors of a layer live on the ranks of one pipeline stage only (see the form `model`).",
        "切层：一层的张量只在某一级流水线的 rank 上（见 `model` 形式）。",
    ),
    "sp": (
        "Ulysses: cuts the tokens of each packed row everywhere but in attention, where an all-to-all trades tokens for "
        "heads, so that each rank sees whole sequences of A / sp heads. It is not Megatron's sequence parallelism "
        "(SP), which rides on tp.",
        "Ulysses：除 attention 外处处沿打包后整行的 token 切分；在 attention 处用 all-to-all 以 token 换头，"
        "每个 rank 看到完整序列、A / sp 个头。它不是 Megatron 的序列并行（SP），后者搭在 tp 上。",
    ),
    "cp": (
        "Cuts the context, in attention as well: queries stay local, keys and values travel in a ring or are gathered. "
        "Masks, positions and the causal balance must be cut the same way.",
        "切上下文，attention 中也切：query 留在本地，key/value 沿环传递或被聚合。"
        "mask、position 与因果负载要按同样方式切。",
    ),
    "ep": (
        "Cuts experts: tokens travel to the rank that holds their expert. It rides on dp: of each ep neighbouring dp ranks "
        "every one holds other experts, so the ranks of a job are dp*tp*pp*cp*sp, not ep times as many.",
        "切专家：token 被送到持有其专家的 rank。它搭在 dp 上：每 ep 个相邻的 dp rank 各持有不同的专家，"
        "所以作业的 rank 数是 dp*tp*pp*cp*sp，而不再乘以 ep。",
    ),
}
