"""Which trainer runs, on which GPUs, and how rollout and training share them."""

import re
from typing import Any

from flowledger.config.settings import Draft, Settings
from flowledger.config.verl.compose import Composed
from flowledger.config.verl.words import word
from flowledger.flow.errors import nearest
from flowledger.tables import verl

ROLLOUT = "actor_rollout_ref.rollout"
MODES = ("sync", "colocate_async", "separate_async")  # of verl's V1 trainer
ENGINES = ("vllm", "sglang", "trtllm")
APART = ("one_step_off", "fully_async", "separate_async")  # rollout has GPUs of its own
_V1 = "trainer.v1.trainer_mode"


def mode(settings: Settings, composed: Composed) -> str:
    """`sync`, `colocate_async`, `separate_async` (V1), `v0`, `one_step_off` or `fully_async`."""
    own = verl.mode_of(composed.config)
    if own != "colocated":
        return own
    if composed.module.endswith("_v0") or not settings.flag("trainer.use_v1"):
        return "v0"
    named = settings.text(_V1) or "sync"
    if named not in MODES:
        raise settings.bad(_V1, f"is no mode of verl{nearest(named, MODES)}; use {', '.join(MODES)}")
    return named


def hardware(settings: Settings, draft: Draft, trainer: str) -> None:
    """Whether the inference engine has GPUs of its own, and how far it may run ahead."""
    pools = {"one_step_off": "rollout", "fully_async": "rollout", "separate_async": ROLLOUT}
    pool = pools.get(trainer)
    if pool is not None:
        nodes, each = settings.integer(f"{pool}.nnodes") or 0, settings.integer(f"{pool}.n_gpus_per_node") or 0
        draft.put("rollout.serving.colocated", False, _V1 if trainer == "separate_async" else f"{pool}.nnodes")
        draft.put("rollout.serving.gpus", nodes * each or None, f"{pool}.nnodes", f"{pool}.n_gpus_per_node")
    if trainer == "one_step_off":
        draft.put("async.mode", "one_step_off")
        draft.put("async.max_staleness", 1)
    elif trainer == "fully_async":
        threshold = "async_training.staleness_threshold"
        draft.put("async.mode", "fully_async", threshold)
        draft.put("async.max_staleness", settings.number(threshold), threshold)
    elif trainer in ("colocate_async", "separate_async"):
        threshold = "trainer.v1.sampler.max_off_policy_threshold"
        draft.put("async.mode", "fully_async", _V1)
        draft.put("async.max_staleness", settings.number(threshold), threshold)


def serving(settings: Settings, draft: Draft, trainer: str) -> None:
    """What of the inference engine depends on several keys."""
    target, apart = "rollout.serving", trainer in APART
    name = settings.text(f"{ROLLOUT}.name") or ""
    if name not in ENGINES:
        raise settings.bad(f"{ROLLOUT}.name", f"is no inference engine of verl{nearest(name, ENGINES)}; use vllm")
    share = f"{ROLLOUT}.gpu_memory_utilization"
    alone = f"{ROLLOUT}.standalone_gpu_memory_utilization"
    own = settings.number(alone) if apart else None
    draft.put(f"{target}.memory_fraction", own or settings.number(share), *((alone,) if own else (share,)))
    longest, positions = f"{ROLLOUT}.max_model_len", "actor_rollout_ref.model.override_config.max_position_embeddings"
    if settings.integer(longest) is None:  # then it is the model's own limit, which may be overridden
        draft.put(f"{target}.max_model_tokens", settings.integer(positions), positions)
    sleeps = f"{ROLLOUT}.free_cache_engine"
    draft.put(f"{target}.sleeps", settings.flag(sleeps) and not apart, sleeps)
    bucket, backend = (f"{ROLLOUT}.checkpoint_engine.{key}" for key in ("update_weights_bucket_megabytes", "backend"))
    megabytes = settings.integer(bucket)
    draft.put(f"{target}.sync_bucket_bytes", megabytes * 2**20 if megabytes is not None else None, bucket)
    draft.put(f"{target}.sync_buckets", 1 if settings.text(backend) in (None, "naive") else 2, backend)
    quantized = f"{ROLLOUT}.quantization"
    key = quantized if settings.get(quantized) is not None else f"{ROLLOUT}.dtype"
    draft.put(f"{target}.dtype", word(settings, "dtype", key), key)
    for cache in (f"{ROLLOUT}.engine_kwargs.{name}.kv_cache_dtype" for name in ("vllm", "sglang")):
        if settings.get(cache) not in (None, "auto"):
            draft.put(f"{target}.kv_dtype", word(settings, "dtype", cache), cache)


def data(settings: Settings, draft: Draft, trainer: str) -> None:
    """Prompts of a step (fully async: those that the trainer waits for), files, name, checkpoints."""
    batch, mini = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
    if trainer == "fully_async":
        taken = "async_training.require_batches"
        count = settings.count(mini) * settings.count(taken)
        draft.put("data.prompts_per_step", count, mini, taken)
        settings.get(batch)
    else:
        draft.put("data.prompts_per_step", settings.count(batch), batch)
    files = settings.words("data.train_files")
    draft.put("data.path", _first(files), "data.train_files")
    if settings.flag("data.filter_overlong_prompts"):
        draft.put("data.too_long", "skip", "data.filter_overlong_prompts")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", settings.text("trainer.experiment_name") or "").strip("-._")
    draft.put("name", name[:100] or None, "trainer.experiment_name")
    every = settings.integer("trainer.save_freq")
    if every and every > 0:
        draft.put("checkpoint.every_steps", every, "trainer.save_freq")
        draft.put("checkpoint.path", settings.text("trainer.default_local_dir") or None, "trainer.default_local_dir")
    warmup = "actor_rollout_ref.actor.optim.lr_warmup_steps"
    steps = settings.integer(warmup)
    draft.put("optim.warmup_steps", steps if steps and steps > 0 else None, warmup)


def _first(files: tuple[str, ...]) -> str:
    """The first file; `['a', 'b']` also as one text, as shells pass it."""
    first: Any = files[0] if files else "data.parquet"
    return str(first).strip("[]'\" ").split(",")[0].strip("'\" ") or "data.parquet"
