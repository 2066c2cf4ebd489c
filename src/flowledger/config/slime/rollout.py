"""slime's rollout: lengths, sampling, SGLang engines, rewards."""

from flowledger.config.settings import Draft, Settings, table


def rollout(settings: Settings, draft: Draft) -> None:
    """Prompts and responses; what no flag bounds is planned with the lengths of tables/slime.toml and said so."""
    context = settings.integer("rollout_max_context_len")
    prompt, response = settings.integer("rollout_max_prompt_len"), settings.integer("rollout_max_response_len")
    limits = table("slime")["unbounded"]
    if prompt is None:
        prompt = max(
            1, min(limits["rollout_max_prompt_len"], context - 1 if context else limits["rollout_max_prompt_len"])
        )
        settings.notes.append(
            f"no --rollout-max-prompt-len: prompts of {prompt} tokens are planned; --assume rollout_max_prompt_len=N"
        )
    if response is None:
        response = max(1, context - prompt) if context else limits["rollout_max_response_len"]
        settings.notes.append(
            f"no --rollout-max-response-len: responses of {response} tokens are planned; --assume rollout_max_response_len=N"
        )
    draft.put("data.max_prompt_tokens", prompt, "rollout_max_prompt_len", "rollout_max_context_len")
    draft.put("rollout.max_response_tokens", response, "rollout_max_response_len", "rollout_max_context_len")
    draft.put("data.path", settings.text("prompt_data") or "prompts", "prompt_data")
    draft.put("data.prompt_key", settings.text("input_key"), "input_key")
    draft.put("data.answer_key", settings.text("label_key"), "label_key")
    draft.put("data.chat_template", settings.flag("apply_chat_template"), "apply_chat_template")
    draft.put("data.shuffle", settings.flag("rollout_shuffle"), "rollout_shuffle")
    draft.put("rollout.temperature", settings.number("rollout_temperature"), "rollout_temperature")
    draft.put("rollout.top_p", settings.number("rollout_top_p"), "rollout_top_p")
    draft.put("rollout.top_k", max(0, settings.integer("rollout_top_k") or 0), "rollout_top_k")
    draft.put("rollout.stop_token_ids", settings.get("rollout_stop_token_ids"), "rollout_stop_token_ids")


def serving(settings: Settings, draft: Draft) -> None:
    """A replica of SGLang has rollout_num_gpus_per_engine GPUs: tp * pp of them."""
    put = draft.put
    gpus, pp = settings.count("rollout_num_gpus_per_engine"), settings.count("sglang_pp_size")
    colocated = settings.flag("colocate")
    put("rollout.serving.engine", "sglang")
    put("rollout.serving.mesh.tp", max(1, gpus // pp), "rollout_num_gpus_per_engine")
    put("rollout.serving.mesh.pp", pp, "sglang_pipeline_parallel_size", "sglang_pp_size")
    put("rollout.serving.mesh.ep", settings.count("sglang_ep_size"), "sglang_expert_parallel_size", "sglang_ep_size")
    put("rollout.serving.colocated", colocated, "colocate")
    put("rollout.serving.gpus", None if colocated else settings.integer("rollout_num_gpus"), "rollout_num_gpus")
    put("rollout.serving.memory_fraction", settings.number("sglang_mem_fraction_static"), "sglang_mem_fraction_static")
    put("rollout.serving.max_running", settings.integer("sglang_max_running_requests"), "sglang_max_running_requests")
    chunk = settings.integer("sglang_chunked_prefill_size")
    put("rollout.serving.max_batched_tokens", chunk if chunk and chunk > 0 else None, "sglang_chunked_prefill_size")
    longest = settings.integer("sglang_context_length") or settings.integer("rollout_max_context_len")
    put("rollout.serving.max_model_tokens", longest, "sglang_context_length", "rollout_max_context_len")
    put("rollout.serving.block_tokens", settings.integer("sglang_page_size") or 1, "sglang_page_size")
    kept = table("slime")["kv_dtype"].get(str(settings.get("sglang_kv_cache_dtype")))
    put("rollout.serving.kv_dtype", kept, "sglang_kv_cache_dtype")
    put("rollout.serving.dtype", "bfloat16", "sglang_dtype")
    settings.get("sglang_dtype")
    put("rollout.serving.cuda_graphs", not settings.flag("sglang_disable_cuda_graph"), "sglang_disable_cuda_graph")
    put("rollout.serving.sleeps", settings.flag("offload_rollout"), "offload_rollout", "offload", "colocate")
    put("rollout.serving.sync_bucket_bytes", settings.integer("update_weight_buffer_size"), "update_weight_buffer_size")


def rewards(settings: Settings, draft: Draft) -> None:
    path = settings.text("custom_rm_path") or settings.text("rm_url") or settings.text("rm_type")
    if path:
        component = {"name": "reward", "kind": "function", "path": path}
        draft.put("reward.components", (component,), "custom_rm_path", "rm_url", "rm_type")
