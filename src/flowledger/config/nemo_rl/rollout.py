"""NeMo-RL's generation: lengths, vLLM or SGLang beside the trainer or on devices of its own, and how stale samples may be."""

from flowledger.config.nemo_rl.engine import DTYPES
from flowledger.config.settings import Draft, Settings, table

GENERATION, VLLM = "policy.generation", "policy.generation.vllm_cfg"
WHOLE = "policy.max_total_sequence_length"


def lengths(settings: Settings, draft: Draft) -> None:
    """Prompt and response share max_total_sequence_length; only max_new_tokens below it says how."""
    whole, new = settings.count(WHOLE), settings.integer(f"{GENERATION}.max_new_tokens")
    settings.get("data.max_input_seq_length")
    assumed = settings.assumed_count("max_prompt_tokens")
    if new is not None and new < whole and not assumed:
        draft.put("rollout.max_response_tokens", new, f"{GENERATION}.max_new_tokens")
        draft.put("data.max_prompt_tokens", whole - new, WHOLE)
        return
    prompt = assumed or table("nemo_rl")["fixed"]["prompt_tokens"]
    prompt = min(prompt, max(1, whole // 2) if assumed is None else whole - 1)
    draft.put("data.max_prompt_tokens", max(1, prompt), WHOLE)
    draft.put("rollout.max_response_tokens", max(1, whole - prompt), WHOLE, f"{GENERATION}.max_new_tokens")
    if assumed is None:
        settings.notes.append(
            f"prompt and response share {whole} tokens: {prompt} of the prompt are planned; --assume max_prompt_tokens=N"
        )


def rollout(settings: Settings, draft: Draft, devices: int) -> None:
    """`rollout.*`, `data.path` and `async.*`; generation has `devices` devices. Raises BadInput."""
    names = ("data.train.dataset_name", "data.train.data_path", "data.dataset_name", "data.train_data_path")
    found = [(key, settings.text(key)) for key in names if settings.has(key)]
    key, path = found[0] if found else (names[0], None)
    draft.put("data.path", path or settings.assumed("data.path") or "dataset", key)
    draft.put("data.shuffle", settings.flag("data.shuffle") if settings.has("data.shuffle") else None, "data.shuffle")
    for target, name in (("temperature", "temperature"), ("top_p", "top_p")):
        draft.put(f"rollout.{target}", settings.number(f"{GENERATION}.{name}"), f"{GENERATION}.{name}")
    draft.put("rollout.top_k", max(0, settings.integer(f"{GENERATION}.top_k") or 0), f"{GENERATION}.top_k")
    draft.put("rollout.max_turns", settings.integer("grpo.max_rollout_turns"), "grpo.max_rollout_turns")
    _engine(settings, draft, devices)
    _asynchronous(settings, draft)


def _engine(settings: Settings, draft: Draft, devices: int) -> None:
    serving, backend = "rollout.serving", settings.text(f"{GENERATION}.backend") or "vllm"
    colocated = settings.flag(f"{GENERATION}.colocated.enabled")
    known = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm", "megatron": "hf", "hf": "hf"}
    if backend not in known:
        raise settings.bad(f"{GENERATION}.backend", f"should be one of {', '.join(known)}; use vllm")
    if backend == "megatron":
        settings.notes.append("generation in Megatron itself is planned as generation by the policy's own weights")
    draft.put(f"{serving}.engine", known[backend], f"{GENERATION}.backend")
    draft.put(f"{serving}.colocated", colocated, f"{GENERATION}.colocated.enabled")
    draft.put(f"{serving}.sleeps", colocated, f"{GENERATION}.colocated.enabled")
    draft.put(f"{serving}.gpus", None if colocated else devices, f"{GENERATION}.colocated.resources.num_nodes")
    own = VLLM if backend == "vllm" else f"{GENERATION}.{backend}_cfg"
    if backend in ("hf", "megatron"):
        draft.put("rollout.weights", "shared", f"{GENERATION}.backend")
        return
    degrees = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "ep": "expert_parallel_size"}
    sizes = {axis: settings.integer(f"{own}.{name}") or 1 for axis, name in degrees.items()}
    for axis, size in sizes.items():
        draft.put(f"{serving}.mesh.{axis}", size, f"{own}.{degrees[axis]}")
    replica = sizes["tp"] * sizes["pp"]
    if devices < replica or devices % replica:
        raise settings.bad(
            f"{own}.tensor_parallel_size",
            f"tp*pp = {replica} does not divide the {devices} devices that generate; use 1",
        )
    inside = max(1, sizes["ep"] // sizes["tp"])  # vLLM's experts are spread over dp*tp ranks
    draft.put(f"{serving}.mesh.dp", inside, f"{own}.expert_parallel_size")
    _memory(settings, draft, own)


def _memory(settings: Settings, draft: Draft, own: str) -> None:
    serving, extra = "rollout.serving", f"{GENERATION}.vllm_kwargs"
    draft.put(
        f"{serving}.memory_fraction", settings.number(f"{own}.gpu_memory_utilization"), f"{own}.gpu_memory_utilization"
    )
    draft.put(f"{serving}.max_model_tokens", settings.integer(f"{own}.max_model_len"), f"{own}.max_model_len")
    draft.put(f"{serving}.cuda_graphs", not settings.flag(f"{own}.enforce_eager"), f"{own}.enforce_eager")
    draft.put(f"{serving}.max_running", settings.integer(f"{extra}.max_num_seqs"), f"{extra}.max_num_seqs")
    batched = f"{extra}.max_num_batched_tokens"
    draft.put(f"{serving}.max_batched_tokens", settings.integer(batched), batched)
    draft.put(f"{serving}.block_tokens", table("nemo_rl")["fixed"]["vllm_block_tokens"])
    precision = str(settings.get(f"{own}.precision") or settings.get("policy.precision"))
    draft.put(
        f"{serving}.dtype",
        "float8" if precision == "fp8" else DTYPES.get(precision),
        f"{own}.precision",
        "policy.precision",
    )
    if str(settings.get(f"{own}.kv_cache_dtype")).startswith("fp8"):
        draft.put(f"{serving}.kv_dtype", "float8", f"{own}.kv_cache_dtype")


def _asynchronous(settings: Settings, draft: Draft) -> None:
    own = "grpo.async_grpo"
    runs_ahead = settings.flag(f"{own}.enabled")
    draft.put("async.mode", "fully_async" if runs_ahead else "sync", f"{own}.enabled")
    age = settings.integer(f"{own}.max_trajectory_age_steps")
    draft.put("async.max_staleness", age if runs_ahead else 0, f"{own}.max_trajectory_age_steps", f"{own}.enabled")
