"""How a TRL run samples: lengths, turns, vLLM beside the trainer or as a server, rewards, old log-probs, and their correction.

Facts: trl 1.16, trl/generation/vllm_generation.py and grpo_trainer.py.
"""

from flowledger.config import correction
from flowledger.config.settings import Draft, Settings, table


def rollout(settings: Settings, draft: Draft, chunks: int) -> None:
    """Sampling and the engine that samples: Transformers' generate on the policy itself, or vLLM.

    `chunks`: steps_per_generation; a rank samples that many micro-batches at once. Raises BadInput.
    """
    longest = settings.count("max_completion_length")
    draft.put("rollout.max_response_tokens", longest, "max_completion_length")
    for target, key in (("temperature", "temperature"), ("top_p", "top_p")):
        draft.put(f"rollout.{target}", settings.number(key), key)
    draft.put("rollout.top_k", max(0, settings.integer("top_k") or 0), "top_k")
    draft.put(
        "data.path", settings.text("dataset_name") or settings.assumed("dataset_name") or "dataset", "dataset_name"
    )
    _prompt_length(settings, draft, longest)
    tools = settings.integer("max_tool_calling_iterations")
    draft.put("rollout.max_turns", None if tools is None else tools + 1, "max_tool_calling_iterations")
    micro = settings.count("per_device_train_batch_size")
    if not settings.flag("use_vllm"):
        draft.put("rollout.serving.engine", "hf", "use_vllm")
        draft.put("rollout.weights", "shared", "use_vllm")
        draft.put("rollout.serving.max_running", micro * chunks, "per_device_train_batch_size")
        draft.put("rollout.serving.cuda_graphs", False, "use_vllm")
        return
    _vllm(settings, draft, micro * chunks)


def _prompt_length(settings: Settings, draft: Draft, response: int) -> None:
    """1.16 cuts no prompt: the length is that of the data, and has to be said or assumed."""
    old, whole = settings.integer("max_prompt_length"), settings.integer("vllm_max_model_length")
    assumed = settings.assumed_count("max_prompt_tokens")
    if old or assumed or (whole and whole > response):
        keys = ("max_prompt_length",) if old else () if assumed else ("vllm_max_model_length",)
        draft.put("data.max_prompt_tokens", old or assumed or (whole or 0) - response, *keys)
        return
    tokens = table("trl")["fixed"]["prompt_tokens"]
    draft.put("data.max_prompt_tokens", tokens)
    settings.notes.append(
        f"{settings.release} cuts no prompt: prompts of up to {tokens} tokens are planned; --assume max_prompt_tokens=N"
    )


def _vllm(settings: Settings, draft: Draft, samples: int) -> None:
    tp, fixed = settings.count("vllm_tensor_parallel_size"), table("trl")["fixed"]
    colocated = settings.text("vllm_mode") == "colocate"
    draft.put("rollout.serving.engine", "vllm", "use_vllm")
    draft.put("rollout.serving.colocated", colocated, "vllm_mode")
    draft.put("rollout.serving.mesh.tp", tp, "vllm_tensor_parallel_size")
    draft.put(
        "rollout.serving.memory_fraction", settings.number("vllm_gpu_memory_utilization"), "vllm_gpu_memory_utilization"
    )
    draft.put("rollout.serving.max_model_tokens", settings.integer("vllm_max_model_length"), "vllm_max_model_length")
    draft.put("rollout.serving.block_tokens", fixed["vllm_block_tokens"])
    draft.put("rollout.serving.sleeps", colocated and settings.flag("vllm_enable_sleep_mode"), "vllm_enable_sleep_mode")
    if not colocated:
        settings.notes.append(
            "vllm_mode = server: `trl vllm-serve` sets the engine's own degrees and memory; not planned here"
        )
        draft.put("rollout.serving.gpus", settings.assumed_count("vllm_gpus"))
        return
    draft.put("rollout.serving.max_running", samples * tp, "steps_per_generation", "per_device_train_batch_size")
    draft.put("rollout.serving.max_batched_tokens", fixed["vllm_max_batched_tokens"])


def rewards(settings: Settings, draft: Draft) -> None:
    """One component for each reward function of the command line, and one for a reward model."""
    rows = []
    for function in settings.words("reward_funcs"):
        module, _, name = function.rpartition(".")
        rows.append({"name": name or function, "kind": "function", "path": f"{module or 'trl.rewards'}:{name}"})
    model = settings.text("reward_model_name_or_path")
    if model:
        rows.append({"name": "reward_model", "kind": "model", "path": model})
    if rows:
        draft.put("reward.components", tuple(rows), "reward_funcs", "reward_model_name_or_path")


def old_log_probs(settings: Settings, chunks: int) -> bool:
    """Whether a pass of its own computes log-probs of the policy that sampled (grpo_trainer.py)."""
    every = chunks * settings.count("num_iterations")
    corrects = settings.flag("use_vllm") and settings.flag("vllm_importance_sampling_correction")
    needed = bool(settings.count("gradient_accumulation_steps") % every) or corrects
    if not needed:
        settings.notes.append("generation and optimizer steps are aligned: no pass for old log-probs")
    return needed


def corrected(settings: Settings, draft: Draft) -> None:
    """Weights of vLLM's samples: `token_mask`, `sequence_truncate`, … A mask has a lower end only where one is given."""
    if not (settings.flag("use_vllm") and settings.flag("vllm_importance_sampling_correction")):
        return
    mode, most, least = (f"vllm_importance_sampling_{name}" for name in ("mode", "clip_max", "clip_min"))
    older = settings.number("vllm_importance_sampling_cap")
    high = settings.number(most) if older is None else older
    level, _, action = (settings.text(mode) or "").partition("_")
    put = correction.banded if action == "mask" else correction.truncated
    put(draft, level, mode, most, "vllm_importance_sampling_cap", high=high, low=settings.number(least))
