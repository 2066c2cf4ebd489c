"""Where to watch TRL's GRPO trainer (1.16): a table and nothing else.

A step of the trainer is no function: it lies between two events of its callbacks. In it a batch may be generated, then
each micro-batch goes through the loss and backward. The names of tensors are TRL's on the left and the flow's on the right.
"""

from flowledger.flow.seams import Probe

VERSIONS = ">=1.16,<1.17"
_GRPO = "trl.trainer.grpo_trainer:GRPOTrainer"
_CALLBACKS = "transformers.trainer_callback:CallbackHandler"
_BATCH = {
    "prompt_ids": "prompt_ids", "completion_ids": "response_ids", "completion_mask": "response_mask",
    "advantages": "advantage", "old_per_token_logps": "old_log_prob", "ref_per_token_logps": "ref_log_prob",
    "sampling_per_token_logps": "rollout_log_prob", "importance_sampling_ratio": "rollout_is_weights",
}  # fmt: skip
_SEQUENCES = {"input_ids": "full_sequence", "attention_mask": "attention_mask"}
_LOG_PROBS = f"{_GRPO}._get_per_token_logps_and_entropies"

PROBES: tuple[Probe, ...] = (
    Probe(
        stage=None, target=f"{_CALLBACKS}.on_step_begin", scope="step", edge="begin",
        args={"state.global_step": "@step"}, versions=VERSIONS,
    ),
    Probe(stage=None, target=f"{_CALLBACKS}.on_step_end", scope="step", edge="end", versions=VERSIONS),
    # ------------------------------------------------------------ a batch is made
    Probe(
        stage=None, target=f"{_GRPO}._generate_and_score_completions", scope="call", results=_BATCH, versions=VERSIONS
    ),
    Probe(stage="rollout", target=f"{_GRPO}._generate", args={"self.model": "@model"}, versions=VERSIONS),
    Probe(
        stage="reward", target=f"{_GRPO}._calculate_rewards", args={"self.reward_func_names": "@component_names"},
        results={"": "reward_components"}, versions=VERSIONS,
    ),
    Probe(
        stage="ref_log_prob", target=_LOG_PROBS, only_if={"model": "self.ref_model"}, args=_SEQUENCES,
        results={"0": "ref_log_prob"}, versions=VERSIONS,
    ),
    Probe(
        stage="old_log_prob", target=_LOG_PROBS, only_if={"model": "self.model"}, not_within=("update_actor",),
        args=_SEQUENCES, results={"0": "old_log_prob"}, versions=VERSIONS,
    ),
    # ------------------------------------------------------------ and learnt from
    Probe(
        stage=None, target=_LOG_PROBS, phase="forward", scope="call", within=("update_actor",),
        args={"model": "@model", **_SEQUENCES}, results={"0": "new_log_prob", "1": "entropy"}, versions=VERSIONS,
    ),
    Probe(
        stage="update_actor", target=f"{_GRPO}.compute_loss", scope="micro_batch", edge="begin",
        args={f"inputs.{name}": tensor for name, tensor in _BATCH.items()}, versions=VERSIONS,
    ),
    Probe(
        stage=None, target="accelerate.accelerator:Accelerator.backward", scope="micro_batch", edge="end",
        versions=VERSIONS,
    ),
    Probe(
        stage=None, target="accelerate.accelerator:Accelerator.backward", phase="backward", scope="call",
        args={"loss": "policy_loss"}, versions=VERSIONS,
    ),
    Probe(
        stage=None, target="accelerate.optimizer:AcceleratedOptimizer.step", phase="step", scope="call",
        versions=VERSIONS,
    ),
    Probe(stage="checkpoint", target=f"{_GRPO}._save_checkpoint", versions=VERSIONS),
    Probe(stage=None, target=f"{_GRPO}.log", scope="call", args={"logs": "@metrics"}, versions=VERSIONS),
)  # fmt: skip
