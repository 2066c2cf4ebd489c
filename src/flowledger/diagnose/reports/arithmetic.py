"""What follows from a report's numbers: ranks, shares, accumulation, sizes of tensors. Each row: a name, and how it is made.

Rows are made in order, so that a later one may use an earlier; a row whose inputs are missing is left out. Bytes in GiB.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

GIB = 2**30
SAME = 0.03  # relative difference below which two ratios are the same
Facts = Mapping[str, Any]


def _legal_sp(facts: Facts) -> list[int]:
    """Ulysses degrees: they divide the query heads, and divide the key-value heads or are a multiple of them."""
    heads, kv = facts["heads"], facts["kv_heads"]
    return [sp for sp in range(1, heads + 1) if heads % sp == 0 and (kv % sp == 0 or sp % kv == 0)]


def _next_sp(facts: Facts) -> int | None:
    return next((sp for sp in _legal_sp(facts) if sp > facts["sp"]), None)


def _world(facts: Facts) -> int:
    if "gpus_per_node" in facts:
        return int(facts.get("nodes", 1) * facts["gpus_per_node"])
    return int(facts["spoken_gpus"])


def _dp(facts: Facts) -> int:
    """Ranks that see different samples: the world over every axis that shares one."""
    share = 1
    for axis in ("tp", "pp", "cp", "sp"):
        share *= facts.get(axis, 1)
    return int(facts["world"] // share) if facts["world"] % share == 0 else int(facts["world"] / share)


def _tokens_of_allocation(width: int) -> Callable[[Facts], float]:
    """tokens · vocabulary share · bytes = one allocation."""
    return lambda facts: facts["alloc_gib"] * GIB / (facts["vocab_share"] * width)


def _row_step(facts: Facts) -> int:
    """What rows of a dispatch grow by: where a batch size counts prompts (and not samples), by whole groups too."""
    whole = "prompts" in facts and facts["rows"] == facts["prompts"] * facts.get("group", 1)
    return math.lcm(facts["chunks"], facts.get("group", 1) if whole else 1)


# Degrees that a loss, a gradient or a metric is multiplied or divided by where it is reduced once too often.
DEGREES = {
    "cp": "the context-parallel degree (cp)", "accumulation": "the number of gradient accumulation steps", "generation_windows": "steps_per_generation ÷ gradient accumulation steps",
    "group": "the group size (num_generations, n)", "micro": "the micro-batch", "dp": "the data-parallel degree (dp)", "sp": "the sequence-parallel degree (sp)",
    "tp": "the tensor-parallel degree (tp)", "pp": "the pipeline degree (pp)", "world": "the number of ranks",
}  # fmt: skip


def _scale_degree(facts: Facts) -> str | None:
    """The degrees that the ratio of what was seen to what should be is equal to, or one over it; none where more than two are."""
    ratio = max(facts["scale_ratio"], 1 / facts["scale_ratio"])
    found = [
        f"{says} = {facts[name]:g}"
        for name, says in DEGREES.items()
        if facts.get(name, 1) != 1 and abs(max(facts[name], 1 / facts[name]) / ratio - 1) < SAME
    ]
    return " or ".join(found) if 0 < len(found) <= 2 else None


def _multiple_above(number: int, of: int) -> int:
    return -(-number // of) * of


def _size_pair(facts: Facts) -> tuple[int, int]:
    one, other = ("size_a", "size_b") if "size_a" in facts else ("size_expected", "size_got")
    return int(facts[one]), int(facts[other])


def _state_bytes(facts: Facts) -> float:
    """Bytes a parameter on one rank: weights 2, gradients 2, float32 master and moments 12, sharded by the ZeRO stage (FSDP: 3)."""
    ranks, stage = facts["state_ranks"], facts.get("zero_stage", 3)
    return sum(size / (ranks if stage >= least else 1) for size, least in ((2, 3), (2, 2), (12, 1)))


def _axis(facts: Facts) -> str | None:
    """The axis whose degree is the ratio of two sizes, where exactly one is."""
    one, other = sorted((facts["size_low"], facts["size_high"]))
    if one < 1 or other % one or other == one:
        return None
    axes = [
        axis for axis in ("tp", "cp", "sp", "pp", "dp", "ep", "rollout_tp", "group") if facts.get(axis) == other // one
    ]
    return axes[0] if len(axes) == 1 else None


DERIVED: tuple[tuple[str, Callable[[Facts], Any]], ...] = (
    # machines and axes
    ("world", _world),
    ("actor_world", lambda f: f.get("actor_nodes", 1) * f["actor_gpus_per_node"]),
    ("dp", _dp),
    ("micro", lambda f: max(1, f["micro_all_ranks"] // f["world"])),
    ("logprob_micro", lambda f: max(1, f["logprob_micro_all_ranks"] // f["world"])),
    # batches: [prompts] -> [prompts*G] -> a rank's share -> micro-batches
    ("samples_step", lambda f: f["prompts"] * f["group"]),
    ("mini_samples", lambda f: f["mini"] * f["group"]),
    ("rank_rows", lambda f: f["samples_step"] / f["dp"]),
    ("rank_mini", lambda f: f["mini_samples"] / f["dp"]),
    ("rank_mini_without_sp", lambda f: f["mini_samples"] / f["world"]),
    ("accumulation_steps", lambda f: int(f["rank_mini"] // f["micro"])),
    ("row_step", _row_step),
    ("rows_below", lambda f: f["rows"] // f["row_step"] * f["row_step"] or None),
    ("rows_above", lambda f: _multiple_above(f["rows"], f["row_step"])),
    ("prompts_above", lambda f: _multiple_above(f["prompts"], f["world"])),
    ("prompts_above_repeated", lambda f: _multiple_above(f["prompts"], f["world"] // math.gcd(f["world"], f["group"]))),
    ("length_unit", lambda f: f.get("cp", 1) * math.lcm(2 if f.get("cp", 1) > 1 else 1, f.get("tp", 1))),
    ("generation_windows", lambda f: f["steps_per_generation"] / f["accumulation"]),
    ("scale_degree", _scale_degree),
    # lengths
    ("row_tokens", lambda f: f["max_prompt"] + f["max_response"]),
    ("row_tokens", lambda f: f["max_response"]),
    ("row_tokens", lambda f: f["seq"]),
    ("row_tokens", lambda f: f["max_model_len"]),
    ("seen_longest", lambda f: f["max_length"]),
    ("limit_tokens", lambda f: max(f[name] for name in ("max_response", "max_model_len", "row_tokens") if name in f)),
    ("token_room", lambda f: f["token_cap"] * f.get("cp", 1) * f.get("sp", 1)),
    ("row_ranks", lambda f: f.get("cp", 1) * f.get("sp", 1)),
    # sizes that do not match
    ("size_low", lambda f: min(_size_pair(f))),
    ("size_high", lambda f: max(_size_pair(f))),
    ("size_axis", _axis),
    ("size_difference", lambda f: f["size_high"] - f["size_low"]),
    ("low_is_limit_plus_one", lambda f: f["size_low"] - 1 == f.get("max_response") or (f["size_low"] - 1) % 256 == 0),
    # heads
    ("legal_sp", lambda f: ", ".join(map(str, _legal_sp(f)))),
    ("next_sp", _next_sp),
    # weights and states, a rank
    ("weights_gib", lambda f: 2 * f["params_b"] * 1e9 / GIB),
    ("state_ranks", lambda f: f.get("actor_world") or f["world"]),
    ("states_gib", lambda f: _state_bytes(f) * f["params_b"] * 1e9 / GIB),
    ("trained_gib", lambda f: (2 if f.get("estimator") in ("gae", "ppo") else 1) * f["states_gib"]),
    ("moments_gib", lambda f: 8 * f["params_b"] * 1e9 / f["state_ranks"] / GIB),
    # logits [tokens, V/tp]; a text model whose name is not known has some 128,000 entries or more
    ("vocab", lambda f: 128_000 if f["params_b"] and not f.get("moe") else None),
    ("vocab_share", lambda f: f["vocab"] // f.get("tp", 1)),
    ("alloc_gib", lambda f: f["alloc_bytes"] / GIB),
    ("alloc_tokens", _tokens_of_allocation(4)),
    ("alloc_tokens_half", _tokens_of_allocation(2)),
    ("seen_logits_gib", lambda f: f["seen_tokens"] * f["vocab_share"] * 4 / GIB),
    ("logits_gib", lambda f: f["row_tokens"] / f["row_ranks"] * f["vocab_share"] * 4 / GIB),
    ("logits_mib", lambda f: f["row_tokens"] / f["row_ranks"] * f["vocab_share"] * 2 / 2**20),
    # the engine
    ("engine_gib", lambda f: f["util"] * f["gpu_gib"]),
    ("left_gib", lambda f: f["gpu_gib"] - f["engine_gib"]),
    ("bucket_percent", lambda f: 100 * f["bucket_ratio"]),
    ("bucket_percent", lambda f: f["free_percent"]),
    # host memory
    ("worker_sum_gib", lambda f: sum(f["per_worker_gib"])),
    ("worker_count", lambda f: len(f["per_worker_gib"])),
    ("host_share", lambda f: f["host_used_gib"] / f["host_gib"]),
    # fragmentation: reserved − allocated
    ("unallocated_gib", lambda f: f["reserved_gib"] - f["allocated_gib"]),
    ("fragmentation_rise", lambda f: f["fragmentation_last"] - f["fragmentation_first"]),
    ("allocated_fall", lambda f: f["allocated_first"] - f["allocated_last"]),
    # rows that go with their group: 1 - (1 - p)^n
    ("group_loss", lambda f: 1 - (1 - f["failure_rate"]) ** f["group"]),
    ("serial_s", lambda f: f["samples_step"] * f["call_s"]),
    ("kl_off", lambda f: f.get("kl_coef") == 0 or (f.get("use_kl_loss") is False and not f.get("kl_coef")) or None),
    ("count_gap", lambda f: abs(f["count_one"] - f["count_other"])),
    ("logprob_logits_gib", lambda f: f["logprob_micro"] * f["logits_gib"]),
    ("micro_logits_gib", lambda f: f["micro"] * f["logits_gib"]),
    ("versions_mixed", lambda f: len(set(f["weight_versions"]))),
    ("step_spread", lambda f: f["std_s"] / f["mean_s"]),
)  # fmt: skip
