"""Where to watch TRL's GRPO and RLOO trainers (1.16): tables and nothing else.

A step of a trainer is no function: it lies between an event of its callbacks and what follows the optimizer's step. In it
a batch may be generated, then each micro-batch goes through the loss and backward. The names of tensors are TRL's on the
left and the flow's on the right. What is generated to evaluate is one stage, and nothing in it is the step's.
"""

from typing import Any

from flowledger.flow.seams import Probe

VERSIONS = ">=1.16,<1.17"
TRAINERS = {
    "trl_grpo": "trl.trainer.grpo_trainer:GRPOTrainer",
    "trl_rloo": "trl.trainer.rloo_trainer:RLOOTrainer",
}  # by the table of what they call metrics
_TRAINER = "transformers.trainer:Trainer"
_ACCELERATOR = "accelerate.accelerator:Accelerator"
_BATCH = {
    "prompt_ids": "prompt_ids", "prompt_mask": "prompt_mask", "completion_ids": "response_ids",
    "completion_mask": "response_mask", "advantages": "advantage", "old_per_token_logps": "old_log_prob",
    "old_logps": "old_log_prob", "ref_per_token_logps": "ref_log_prob",
    "sampling_per_token_logps": "rollout_log_prob", "importance_sampling_ratio": "rollout_is_weights",
    "num_items_in_batch": "@metric:num_items_in_batch",
}  # fmt: skip
_KNOWN_BY = "prompt_ids,completion_ids"  # what tells the rows of a batch apart
_SEQUENCES = {"input_ids": "full_sequence", "attention_mask": "attention_mask"}
_SCORED = {**_SEQUENCES, "input_ids": "@samples & full_sequence"}
_SIZES = {
    "self.num_generations": "@bind:G", "self.args.generation_batch_size": "@bind:B",
    **{f"self.model.config.{name}": f"@bind:{symbol}" for name, symbol in (
        ("vocab_size", "V"), ("hidden_size", "H"), ("num_hidden_layers", "L"), ("num_attention_heads", "A"),
        ("num_key_value_heads", "K"), ("head_dim", "D"), ("intermediate_size", "F"),
    )},
}  # fmt: skip
_TRAINING: dict[str, Any] = {"not_within": ("validate",)}


def _probe(target: str, *, stage: str | None = None, scope: str = "call", **told: Any) -> Probe:
    return Probe(stage=stage, target=target, scope=scope, versions=VERSIONS, **told)


def _made(trainer: str) -> tuple[Probe, ...]:
    """How a trainer makes a batch. Of probes of one function the last looks first."""
    log_probs = f"{trainer}._get_per_token_logps_and_entropies"
    reference: dict[str, Any] = {
        "stage": "ref_log_prob",
        "scope": "stage",
        "args": _SCORED,
        "results": {"0": "ref_log_prob"},
    }
    scoring: dict[str, Any] = {"not_within": ("update_actor", "ref_log_prob", "validate")}
    return (
        _probe(
            f"{trainer}._generate_and_score_completions", args={"inputs": "@new_samples"},
            results={"": f"@samples_made:{_KNOWN_BY}", **_BATCH}, **_TRAINING,
        ),
        _probe(
            f"{trainer}._generate", stage="rollout", scope="stage",
            args={
                "self.model": "@model", "self.state.global_step": "@policy_version", "prompts": "@samples",
                "self.eos_token_ids": "@end_tokens", "self._tokenizer.pad_token_id": "@end_tokens:pad",
            },
            results={"1": "@responses"}, **_TRAINING,
        ),
        _probe(
            f"{trainer}._calculate_rewards", stage="reward", scope="stage",
            args={"self.reward_func_names": "@component_names", "self.reward_weights": "@reward_weights"},
            results={"": "@samples & reward_components"}, **_TRAINING,
        ),
        _probe(
            log_probs, stage="old_log_prob", scope="stage", only_if={"model": "self.model"}, args=_SCORED,
            results={"0": "old_log_prob"}, **scoring,
        ),
        # PEFT has no model for the reference: it is the policy without its adapter, or with the first of two
        _probe(log_probs, only_if={"model": "self.model", "self.model._adapters_disabled": "=True"}, **reference, **scoring),
        _probe(log_probs, only_if={"model": "self.model", "self.model.active_adapter": "=ref"}, **reference, **scoring),
        _probe(log_probs, only_if={"model": "self.ref_model"}, **reference, **scoring),
    )  # fmt: skip


def _learnt_from(trainer: str) -> tuple[Probe, ...]:
    """How a trainer learns from a batch, and what it says of that."""
    return (
        _probe(
            f"{trainer}._get_per_token_logps_and_entropies", phase="forward", within=("update_actor",),
            args={"model": "@model", **_SEQUENCES}, results={"0": "new_log_prob", "1": "entropy"},
        ),
        _probe(
            f"{trainer}.compute_loss", stage="update_actor", scope="micro_batch", edge="begin",
            args={
                "inputs": f"@samples_among:{_KNOWN_BY}",
                **{f"inputs.{name}": tensor for name, tensor in _BATCH.items() if not tensor.startswith("@")},
            },
            **_TRAINING,
        ),
        _probe(f"{trainer}._save_checkpoint", stage="checkpoint", scope="stage"),
    )  # fmt: skip


PROBES: tuple[Probe, ...] = (
    _probe(f"{_TRAINER}.train", args={"self._tokenizer": "@tokenizer", **_SIZES}),
    _probe(
        "transformers.trainer_callback:CallbackHandler.on_step_begin", scope="step", edge="begin",
        args={"state.global_step": "@step"},
    ),
    _probe("transformers.trainer_callback:CallbackHandler.on_step_end", scope="stage", edge="end"),
    _probe(f"{_TRAINER}._maybe_log_save_evaluate", scope="step", edge="end"),
    _probe(f"{_TRAINER}.evaluate", stage="validate", scope="stage"),
    *(probe for trainer in TRAINERS.values() for probe in (*_made(trainer), *_learnt_from(trainer))),
    _probe("trl.generation.vllm_generation:VLLMGeneration.sync_weights", stage="weight_sync", scope="stage", optional=True),
    _probe(f"{_ACCELERATOR}.backward", phase="backward", args={"loss": "policy_loss"}),
    _probe(f"{_ACCELERATOR}.backward", scope="micro_batch", edge="end"),
    _probe(f"{_ACCELERATOR}.clip_grad_norm_", within=("update_actor",), results={"": "grad_norm"}),
    _probe("accelerate.optimizer:AcceleratedOptimizer.step", phase="step"),
    *(
        _probe(f"{trainer}.log", results={"args.logs": f"@metrics:{table}"})
        for table, trainer in TRAINERS.items()
    ),
)  # fmt: skip
