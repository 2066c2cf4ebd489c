"""Where to watch verl (0.9.1): a table and nothing else.

The driver (the TaskRunner actor) goes through the stages in verl's own timers. A worker (one a GPU) is called for each of
them; its steps are those of the weights that it sends. Names of tensors are verl's on the left, the flow's on the right.
V0's batches are padded, and lie in the driver; V1's are jagged, and the driver fetches what it needs from TransferQueue.
"""

from flowledger.flow.seams import Probe

VERSIONS = ">=0.9.1,<0.10"

# verl's timers -> stages
TIMERS = {
    "gen": "rollout", "generate_async": "rollout", "reward": "reward", "old_log_prob": "old_log_prob",
    "ref": "ref_log_prob", "values": "values", "adv": "advantage", "update_critic": "update_critic",
    "update_actor": "update_actor", "save_checkpoint": "checkpoint", "update_weights": "weight_sync",
    "sync_rollout_weights": "weight_sync",
}  # fmt: skip

_PADDED = {
    "prompts": "prompt_ids", "responses": "response_ids", "response_mask": "response_mask",
    "input_ids": "full_sequence", "attention_mask": "attention_mask", "position_ids": "position_ids",
}  # fmt: skip
_MADE = {
    "loss_mask": "loss_mask", "rollout_log_probs": "rollout_log_prob", "old_log_probs": "old_log_prob",
    "ref_log_prob": "ref_log_prob", "values": "values", "token_level_rewards": "token_level_reward",
    "advantages": "advantages", "returns": "returns",
}  # fmt: skip
_BATCH = {**_PADDED, **_MADE}
_IN_LOSS = {name: tensor for name, tensor in _BATCH.items() if name != "token_level_rewards"}


def _at(path: str, table: dict[str, str]) -> dict[str, str]:
    return {f"{path}.{name}": tensor for name, tensor in table.items()}


def _probe(target: str, *, stage: str | None = None, scope: str = "call", **told: object) -> Probe:
    return Probe(stage=stage, target=target, scope=scope, versions=VERSIONS, **told)  # type: ignore[arg-type]


def _of(proto: str) -> dict[str, str]:
    """Whose rows a DataProto has: their groups, and what they say."""
    return {f"{proto}.non_tensor_batch.uid": "@group_ids", f"{proto}.batch.responses": "response_ids"}


_OF_PROTO = {"non_tensor_batch.uid": "@group_ids"}  # DataProto, V0
_OF_DICT = {"uid": "@group_ids", "session_id": "@sessions"}  # TensorDict, in workers

# ------------------------------------------------------------------------------------------------------------ the driver
_TIMER = "verl.utils.profiler.performance:_timer"
_V0, _V1 = "verl.trainer.ppo.ray_trainer", "verl.trainer.ppo.v1.trainer_base"
_MANAGER = "verl.checkpoint_engine.base:CheckpointEngineManager"
_TQ = "transfer_queue"
_FIELDS = {**_at("fields", _BATCH), "fields.rm_scores": "token_level_reward"}

_SIZES = {"data.train_batch_size": "@bind:B_prompt", "actor_rollout_ref.rollout.n": "@bind:G"}
_LAUNCHER = "verl.trainer.constants_ppo"

DRIVER: tuple[Probe, ...] = (
    # The process that the user starts sees nothing more of the training: it makes the run, and ends it.
    _probe(f"{_LAUNCHER}:get_ppo_ray_runtime_env", args=_at("config", _SIZES)),
    _probe(f"{_V0}:RayPPOTrainer.init_workers", args=_at("self.config", _SIZES)),
    _probe(f"{_V1}:PPOTrainer.init", args=_at("self.config", _SIZES)),
    _probe(_TIMER, scope="step", only_if={"name": "=step"}),
    *(_probe(_TIMER, scope="stage", stage=stage, only_if={"name": f"={name}"}) for name, stage in TIMERS.items()),
    _probe(f"{_MANAGER}.update_weights", args={"global_steps": "@done_step"}),
    _probe("verl.utils.tracking:Tracking.log", args={"step": "@at_step", "data": "@metrics:verl"}),
    # ------------------------------------------------------------ V0: batches are DataProto
    _probe(
        "verl.experimental.agent_loop.agent_loop:AgentLoopManager.generate_sequences",
        args=_at("prompts", _OF_PROTO),
        results={
            "non_tensor_batch.min_global_steps": "@versions",
            **_at("batch", {**_PADDED, "rollout_log_probs": "rollout_log_prob", "rm_scores": "token_level_reward"}),
        },
        within=("rollout",),  # not the samples of a validation
    ),
    _probe(
        f"{_V0}:RayPPOTrainer._compute_old_log_prob", args=_of("batch"),
        results={"0.batch.old_log_probs": "old_log_prob", "0.batch.entropys": "entropy"},
    ),
    _probe(
        f"{_V0}:RayPPOTrainer._compute_ref_log_prob", args=_of("batch"),
        results={"batch.ref_log_prob": "ref_log_prob"},
    ),
    _probe(
        f"{_V0}:RayPPOTrainer._compute_values", args=_of("batch"), results={"batch.values": "values"},
    ),
    _probe(
        f"{_V0}:compute_advantage",
        args={**_at("data", _OF_PROTO), **_at("data.batch", {"token_level_rewards": "token_level_reward", **_PADDED})},
        results={"batch.advantages": "advantages", "batch.returns": "returns"},
    ),
    _probe(
        f"{_V0}:RayPPOTrainer._update_actor", args={**_at("batch", _OF_PROTO), **_at("batch.batch", _BATCH)},
    ),
    # ------------------------------------------------------------ V1: batches are keys, tensors lie in TransferQueue
    _probe(
        f"{_TQ}:kv_batch_get", args={"keys": "@sample_keys"},
        results={**_BATCH, "rm_scores": "token_level_reward"}, result_access="read",
        only_if={"partition_id": "=train"}, within=tuple(dict.fromkeys(TIMERS.values())),
    ),
    _probe(
        f"{_TQ}:kv_batch_put", args={"keys": "@sample_keys", **_FIELDS}, argument_access="write",
        only_if={"partition_id": "=train"}, within=tuple(dict.fromkeys(TIMERS.values())),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------------ agent loops
AGENT_LOOP: tuple[Probe, ...] = (
    _probe(
        f"{_TQ}:async_kv_batch_put", args={"keys": "@sample_keys", "tags": "@tags", **_FIELDS}, argument_access="write",
        stage="rollout", only_if={"partition_id": "=train"},
    ),
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------------ reward loops
_REWARD_LOOP = "verl.experimental.reward_loop.reward_loop"
REWARD_LOOP: tuple[Probe, ...] = (_probe(f"{_REWARD_LOOP}:RewardLoopWorker.compute_score", stage="reward"),)

# ------------------------------------------------------------------------------------------------------------ the workers
_WORKER = "verl.workers.engine_workers:ActorRolloutRefWorker"
_TRAINING = "verl.workers.engine_workers:TrainingWorker"
_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
_CHECKPOINT = "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager"

# vLLM ends a response at any of these; verl passes on neither which it was nor that it was one.
_ENDINGS = {
    "actor.model_config.tokenizer.eos_token_id": "@end_tokens:tokenizer",
    "actor.model_config.generation_config.eos_token_id": "@end_tokens:model",
    "config.rollout.response_length": "@response_limit",
}

WORKER: tuple[Probe, ...] = (
    _probe(f"{_WORKER}.init_model", args={"self.config.rollout.n": "@bind:G"}, results=_at("args.self", _ENDINGS)),
    _probe(f"{_WORKER}.compute_log_prob", scope="stage", stage="old_log_prob", opens_step=True),
    _probe(f"{_WORKER}.compute_ref_log_prob", scope="stage", stage="ref_log_prob", opens_step=True),
    _probe(f"{_WORKER}.update_actor", scope="stage", stage="update_actor", opens_step=True),
    _probe(f"{_WORKER}.update_weights", scope="stage", stage="weight_sync", args={"global_steps": "@done_step"}),
    _probe(f"{_WORKER}.save_checkpoint", scope="stage", stage="checkpoint"),
    _probe(f"{_WORKER}.load_checkpoint", scope="stage", stage="checkpoint"),
    _probe(f"{_CHECKPOINT}.save_checkpoint", results={"args.local_path": "@written_checkpoint"}),
    _probe(f"{_CHECKPOINT}.load_checkpoint", args={"local_path": "@restored_checkpoint"}),
    _probe(f"{_TRAINING}.infer_batch", args={**_at("data", _OF_DICT), **_at("data", _BATCH)}),
    _probe(f"{_TRAINING}.train_mini_batch", args={**_at("data", _OF_DICT), **_at("data", _BATCH)}),
    # A critic is a TrainingWorker of its own, and is called without more; the stage is around the calls above.
    _probe(
        f"{_TRAINING}.infer_batch", scope="stage", stage="values", opens_step=True,
        not_within=("old_log_prob", "ref_log_prob"),
    ),
    _probe(
        f"{_TRAINING}.train_mini_batch", scope="stage", stage="update_critic", opens_step=True, not_within=("update_actor",),
    ),
    _probe(f"{_TRAINING}.train_batch", scope="mini_batch", args=_at("data", _OF_DICT)),
    _probe(
        f"{_ENGINE}:FSDPEngineWithLMHead.forward_step", scope="micro_batch",
        args={**_at("micro_batch", _OF_DICT), **_at("micro_batch", _IN_LOSS)},
    ),
    _probe(
        f"{_ENGINE}:FSDPEngineWithLMHead.prepare_model_inputs",
        results={"0.input_ids": "full_sequence", "0.attention_mask": "attention_mask", "0.position_ids": "position_ids"},
    ),
    _probe(
        f"{_ENGINE}:FSDPEngineWithLMHead.prepare_model_outputs",
        results={"log_probs": "new_log_prob", "entropy": "entropy", "values": "values"},
    ),
    _probe("verl.workers.utils.losses:ppo_loss", phase="loss", results={"0": "policy_loss"}),
    _probe("verl.workers.utils.losses:value_loss", phase="loss", results={"0": "value_loss"}),
    _probe(f"{_ENGINE}:FSDPEngine.optimizer_step", phase="step", results={"": "grad_norm"}),
    _probe(f"{_ENGINE}:FSDPEngine.get_per_tensor_param", streams=True),
)  # fmt: skip

# ------------------------------------------------------------------------------------- vLLM's workers, as verl extends them
_VLLM = "verl.workers.rollout.vllm_rollout.utils"
RECEIVER: tuple[Probe, ...] = (
    _probe(f"{_VLLM}:vLLMColocateWorkerExtension.update_weights_from_ipc", scope="stage", stage="weight_sync"),
    _probe(f"{_VLLM}:vLLMColocateWorkerExtension._update_weights", args={"weights": "@received_weights"}),
)

# Module -> what a process is that is the first to call something in it; others are ranks that train.
ROLES = {
    _LAUNCHER: "launcher", _V1: "driver",
    "verl.utils.profiler.performance": "driver", "verl.utils.tracking": "driver", _V0: "driver",
    "verl.checkpoint_engine.base": "driver", "verl.experimental.agent_loop.agent_loop": "driver",
    _TQ: "agent_loop", _REWARD_LOOP: "reward", _VLLM: "rollout",
}  # fmt: skip
PROBES: tuple[Probe, ...] = (*DRIVER, *AGENT_LOOP, *REWARD_LOOP, *WORKER, *RECEIVER)
