"""The other models of an OpenRLHF run: inference engines, reference policy, critic, rewards."""

from flowledger.config.settings import Draft, Settings


def serving(settings: Settings, draft: Draft) -> None:
    """vLLM engines: beside the policy on its GPUs (colocate_all, synchronous), else on GPUs of their own."""
    engines, tp = settings.integer("vllm.num_engines") or 0, settings.count("vllm.tensor_parallel_size")
    runs_ahead = settings.flag("train.async_enable")
    put = draft.put
    put("rollout.serving.engine", "vllm" if engines else "hf", "vllm.num_engines")
    colocated = settings.flag("train.colocate_all") and not runs_ahead
    put("rollout.serving.colocated", colocated or not engines, "train.colocate_all", "train.async_enable")
    if engines:
        put("rollout.serving.mesh.tp", tp, "vllm.tensor_parallel_size")
        put(
            "rollout.serving.gpus", None if colocated else engines * tp, "vllm.num_engines", "vllm.tensor_parallel_size"
        )
        put(
            "rollout.serving.memory_fraction",
            settings.number("vllm.gpu_memory_utilization"),
            "vllm.gpu_memory_utilization",
        )
        put("rollout.serving.sleeps", settings.flag("vllm.enable_sleep"), "vllm.enable_sleep")
        put("rollout.serving.cuda_graphs", not settings.flag("vllm.enforce_eager"), "vllm.enforce_eager")
        put("rollout.serving.dtype", "bfloat16")
        put("rollout.serving.sync_bucket_bytes", 0)  # one parameter after the other
    if runs_ahead:
        partial = settings.flag("train.partial_rollout_enable")
        put(
            "async.mode",
            "fully_async" if partial else "one_step_off",
            "train.partial_rollout_enable",
            "train.async_enable",
        )
        put("async.max_staleness", settings.count("train.async_queue_size"), "train.async_queue_size")


def rewards(settings: Settings, draft: Draft) -> None:
    """A function or service (`reward.remote_url`, an agent), else a reward model of its own."""
    agent, remote = settings.text("train.agent_func_path"), settings.text("reward.remote_url")
    model = settings.text("reward.model_name_or_path")
    if agent or remote:
        component = {"name": "remote", "kind": "function", "path": agent or str(remote)}
        draft.put("reward.components", (component,), "train.agent_func_path", "reward.remote_url")
    elif model:
        names = model.split(",")
        components = [{"name": f"model_{n}", "kind": "model", "path": name} for n, name in enumerate(names)]
        draft.put("reward.components", tuple(components), "reward.model_name_or_path")


def reference(settings: Settings, draft: Draft) -> None:
    """Held where the KL has a weight: stage 3 like the policy, else a whole copy on each rank (DeepSpeed stage 0)."""
    if not settings.number("algo.kl.init_coef"):
        return
    whole = settings.integer("ds.zero_stage") != 3
    draft.put("ref.path", "start", "algo.kl.init_coef")
    draft.copy("actor.engine", "ref.engine")
    draft.copy("actor.log_prob_micro_batch", "ref.micro_batch")
    draft.put("ref.engine.strategy", "ddp" if whole else "zero3", "ds.zero_stage")
    draft.put("ref.engine.offload.optimizer", False)
    draft.put("ref.engine.offload.grad", False)
    draft.put("ref.engine.offload.optimizer_fraction", 0.0)
    draft.put("ref.engine.offload.param", settings.flag("ref.offload"), "ref.offload")
    draft.put("ref.engine.optimizer.kind", "none")
    draft.put("ref.engine.optimizer.master_dtype", None)
    _own_ranks(settings, draft, "ref")


def critic(settings: Settings, draft: Draft) -> None:
    """Only for `gae`: a value model made from the critic's, the reward's or the policy's checkpoint."""
    if settings.text("algo.advantage.estimator") != "gae":
        return
    remote = settings.has("reward.remote_url")
    start = settings.text("reward.model_name_or_path") if not remote else None
    path = settings.text("critic.model_name_or_path") or (start or "").split(",")[0] or None
    path = path or settings.text("actor.model_name_or_path") or "start"
    draft.put("critic.path", path, "critic.model_name_or_path", "reward.model_name_or_path", "actor.model_name_or_path")
    draft.put("critic.lr", settings.number("critic.adam.lr"), "critic.adam.lr")
    draft.put("critic.clip_value", settings.number("critic.value_clip"), "critic.value_clip")
    draft.put("critic.grad_clip", settings.number("critic.max_norm"), "critic.max_norm")
    frozen = settings.integer("critic.freezing_steps")  # the policy learns in steps after this one, counted from 0
    draft.put("critic.warmup_steps", None if frozen is None else max(0, frozen + 1), "critic.freezing_steps")
    draft.copy("actor.engine", "critic.engine")
    draft.copy("actor.micro_batch", "critic.micro_batch")
    draft.copy("actor.log_prob_micro_batch", "critic.values_micro_batch")
    _own_ranks(settings, draft, "critic")


def _own_ranks(settings: Settings, draft: Draft, role: str) -> None:
    """A model that shares no GPUs has a world of its own."""
    nodes, gpus = f"{role}.num_nodes", f"{role}.num_gpus_per_node"
    shared = settings.count("ds.ring_attn_size") * settings.count("ds.tensor_parallel_size")
    world = settings.count(nodes) * settings.count(gpus)
    draft.put(f"{role}.engine.mesh.dp", max(1, world // shared), gpus, nodes)
