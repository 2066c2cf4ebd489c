"""AReaL's inference engines and how far they may run ahead: `gconfig`, `sglang`, `vllm`, `rollout.max_head_offpolicyness`."""

from flowledger.config.areal.allocation import Allocation
from flowledger.config.areal.engine import DTYPES
from flowledger.config.settings import Draft, Settings, table

# Serving -> the key of each engine.
KEYS = {
    "sglang": {
        "memory_fraction": "mem_fraction_static",
        "max_running": "max_running_requests",
        "max_model_tokens": "context_length",
    },
    "vllm": {
        "memory_fraction": "gpu_memory_utilization",
        "max_running": "max_num_seqs",
        "max_model_tokens": "max_model_len",
    },
}
EAGER = {"sglang": "disable_cuda_graph", "vllm": "enforce_eager"}


def rollout(settings: Settings, draft: Draft, place: Allocation, colocated: bool, source: str) -> None:
    """`rollout.*`, `data.*` and `async.*`. `source`: the key that gave the trainer's degrees."""
    key = "rollout.backend" if source == "actor.backend" else source
    draft.put("rollout.max_response_tokens", settings.count("gconfig.max_new_tokens"), "gconfig.max_new_tokens")
    temperature = settings.number("gconfig.temperature") or None
    draft.put("rollout.temperature", temperature, "gconfig.temperature")
    draft.put("rollout.top_p", settings.number("gconfig.top_p"), "gconfig.top_p")
    _data(settings, draft)
    draft.put("rollout.serving.engine", place.backend, key)
    for axis, degree in {"tp": place.tp, "pp": place.pp}.items():  # its d counts replicas
        draft.put(f"rollout.serving.mesh.{axis}", degree, key)
    draft.put("rollout.serving.colocated", colocated, "rollout.scheduling_strategy.type", key)
    draft.put("rollout.serving.gpus", None if colocated else place.world, key)
    _engine(settings, draft, place.backend, colocated)
    staleness = settings.integer("rollout.max_head_offpolicyness") or 0
    mode = "fully_async" if staleness else "sync"
    draft.put("async.mode", mode, "rollout.max_head_offpolicyness")
    draft.put("async.max_staleness", staleness, "rollout.max_head_offpolicyness")


def _data(settings: Settings, draft: Draft) -> None:
    draft.put(
        "data.path",
        settings.text("train_dataset.path") or settings.assumed("train_dataset.path") or "dataset",
        "train_dataset.path",
    )
    draft.put("data.shuffle", settings.flag("train_dataset.shuffle"), "train_dataset.shuffle")
    longest, assumed = settings.integer("train_dataset.max_length"), settings.assumed_count("max_prompt_tokens")
    if longest or assumed:
        draft.put("data.max_prompt_tokens", longest or assumed, *(("train_dataset.max_length",) if longest else ()))
        return
    tokens = table("areal")["fixed"]["prompt_tokens"]
    draft.put("data.max_prompt_tokens", tokens)
    settings.notes.append(
        f"train_dataset.max_length is not set: prompts of up to {tokens} tokens are planned; --assume max_prompt_tokens=N"
    )


def _engine(settings: Settings, draft: Draft, name: str, colocated: bool) -> None:
    for target, key in KEYS[name].items():
        value = settings.number(f"{name}.{key}")
        if value is not None:
            draft.put(
                f"rollout.serving.{target}", value if target == "memory_fraction" else int(value), f"{name}.{key}"
            )
    draft.put("rollout.serving.cuda_graphs", not settings.flag(f"{name}.{EAGER[name]}"), f"{name}.{EAGER[name]}")
    draft.put("rollout.serving.dtype", DTYPES.get(str(settings.get(f"{name}.dtype"))), f"{name}.dtype")
    if name == "vllm":
        draft.put("rollout.serving.block_tokens", settings.count("vllm.block_size"), "vllm.block_size")
        draft.put(
            "rollout.serving.sleeps", colocated and settings.flag("vllm.enable_sleep_mode"), "vllm.enable_sleep_mode"
        )
        return
    draft.put("rollout.serving.block_tokens", table("areal")["fixed"]["sglang_block_tokens"])
    prefill = settings.integer("sglang.chunked_prefill_size") or 0
    keys = ("sglang.chunked_prefill_size", "sglang.max_prefill_tokens")
    draft.put("rollout.serving.max_batched_tokens", prefill if prefill > 0 else settings.integer(keys[1]), *keys)
    if str(settings.get("sglang.kv_cache_dtype")).startswith("fp8"):
        draft.put("rollout.serving.kv_dtype", "float8", "sglang.kv_cache_dtype")
    draft.put(
        "rollout.serving.sleeps",
        colocated and settings.flag("sglang.enable_memory_saver"),
        "sglang.enable_memory_saver",
    )
