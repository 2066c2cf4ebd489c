"""Where to watch the reference loop: a table and nothing else.

Functions are named as text: this room never imports the loop.
"""

from flowledger.flow.seams import Probe

_SEQUENCES = {
    name: name for name in ("sample_id", "full_sequence", "attention_mask", "position_ids", "response_mask")
}  # fmt: skip

PROBES: tuple[Probe, ...] = (
    Probe(
        stage=None,
        target="flowledger.run.loop:rl_step",
        scope="step",
        args={"step": "@step", "world.weights.version": "@policy_version"},
        metrics={"metrics": "*"},
    ),
    # ------------------------------------------------------------ stages
    Probe(
        stage="prompt",
        target="flowledger.run.stages:prompt",
        args={"tokenizer": "@tokenizer"},
        results={
            name: name
            for name in ("prompt_ids", "attention_mask", "position_ids", "prompt_length", "sample_id", "group_id")
        },
    ),
    Probe(
        stage="rollout",
        target="flowledger.run.stages:rollout",
        args={
            "weights": "updated_params",
            "weights.model": "@model",
            "weights.version": "@policy_version",
            "prompt_ids": "prompt_ids",
            "attention_mask": "attention_mask",
            "prompt_length": "prompt_length",
            "sample_id": "sample_id",
        },
        results={
            name: name
            for name in (
                "response_ids", "response_mask", "full_sequence", "attention_mask", "position_ids", "rollout_log_prob",
                "finish_reason", "generation_metadata",
            )
        },
    ),
    Probe(
        stage="reward",
        target="flowledger.run.stages:reward",
        args={
            "sample_id": "sample_id",
            "full_sequence": "full_sequence",
            "attention_mask": "attention_mask",
            "response_ids": "response_ids",
            "response_mask": "response_mask",
        },
        results={
            "component_names": "@component_names",
            "reward_components": "reward_components",
            "reward": "reward",
            "token_level_reward": "token_level_reward",
        },
    ),
    Probe(stage="rollout", target="flowledger.run.stages:baseline_rollout", args={"weights.model": "@model"}),
    Probe(
        stage="reward",
        target="flowledger.run.stages:baseline_reward",
        results={"baseline_reward": "baseline_reward"},
    ),
    Probe(
        stage="filter",
        target="flowledger.run.stages:filter",
        args={"sample_id": "sample_id", "response_mask": "response_mask", "finish_reason": "finish_reason"},
        results={"loss_mask": "loss_mask", "dropped_reason": "@dropped_reason"},
    ),
    Probe(
        stage="balance",
        target="flowledger.run.stages:balance",
        args={"sample_id": "sample_id", "attention_mask": "attention_mask", "loss_mask": "loss_mask"},
    ),
    Probe(
        stage="balance",
        target="flowledger.run.parallel.rows:exchanged",
        scope="call",
        results={
            name: name
            for name in (
                "full_sequence", "attention_mask", "position_ids", "response_mask", "loss_mask", "rollout_log_prob",
                "token_level_reward", "reward_components", "sample_id", "group_id",
            )
        },
    ),
    Probe(
        stage="old_log_prob",
        target="flowledger.run.stages:old_log_prob",
        args={**_SEQUENCES, "model": "params"},
        results={name: name for name in ("old_log_prob", "entropy", "sum_pi_squared")},
    ),
    Probe(
        stage="ref_log_prob",
        target="flowledger.run.stages:ref_log_prob",
        args={**_SEQUENCES, "reference": "params"},
        results={"ref_log_prob": "ref_log_prob"},
    ),
    Probe(
        stage="values",
        target="flowledger.run.stages:values",
        args={**_SEQUENCES, "critic": "params"},
        results={"values": "values"},
    ),
    Probe(
        stage="advantage",
        target="flowledger.run.stages:advantage",
        args={
            name: name
            for name in (
                "sample_id", "group_id", "reward_components", "token_level_reward", "loss_mask", "rollout_log_prob",
                "old_log_prob", "ref_log_prob", "values", "sum_pi_squared", "baseline_reward",
            )
        },
        results={
            "dropped_reason": "@dropped_reason",
            **{
                name: name
                for name in (
                    "advantage", "advantages", "returns", "token_level_reward", "kl", "rollout_is_weights", "loss_mask",
                )
            },
        },
    ),
    Probe(
        stage="advantage",
        target="flowledger.run.algorithms.groups:by_group",
        scope="call",
        args={"reward": "reward"},
        results={"": "reward"},
    ),
    Probe(
        stage="advantage",
        target="flowledger.run.algorithms.estimate:spread",
        scope="call",
        args={"advantage": "advantage", "mask": "loss_mask"},
        results={"": "advantages"},
    ),
    Probe(
        stage="update_critic",
        target="flowledger.run.stages:update_critic",
        args={
            **_SEQUENCES,
            "critic": "params",
            "critic.optimizer": "optimizer_state",
            **{name: name for name in ("loss_mask", "values", "returns")},
        },
        results={"args.critic": "params"},
    ),
    Probe(
        stage="update_actor",
        target="flowledger.run.stages:update_actor",
        args={
            **_SEQUENCES,
            "model": "params",
            "optimizer": "optimizer_state",
            "loss_mask": "loss_mask",
            "old_log_prob": "old_log_prob",
            "ref_log_prob": "ref_log_prob",
            "advantages": "advantages",
            "rollout_is_weights": "rollout_is_weights",
        },
        results={"args.model": "params", "old_log_prob": "old_log_prob", "loss_mask": "loss_mask"},
    ),
    Probe(
        stage="weight_sync",
        target="flowledger.run.stages:weight_sync",
        args={"model": "params"},
        results={"policy_version": "@policy_version", "args.weights": "updated_params"},
    ),
    Probe(stage="checkpoint", target="flowledger.run.stages:checkpoint", args={"policy": "params"}),
    # ------------------------------------------------------------ within rollout
    Probe(
        stage=None,
        target="flowledger.run.generate:prefill",
        scope="decode",
        args={"prompt_ids": "prompt_ids", "prompt_length": "prompt_length"},
        results={"args.kv_cache": "kv_cache"},
    ),
    Probe(
        stage=None,
        target="flowledger.run.generate:decode_step",
        scope="decode",
        args={"running": "@metric:rollout/running", "waiting": "@metric:rollout/waiting"},
        results={"": "logits", "args.kv_cache": "kv_cache"},
    ),
    Probe(
        stage=None,
        target="flowledger.run.generate:read_answers",
        scope="decode",
        results={"args.kv_cache": "kv_cache"},
    ),
    # ------------------------------------------------------------ within log-probs and update
    Probe(
        stage=None,
        target="flowledger.run.update:log_prob_micro_batch",
        scope="micro_batch",
        args=_SEQUENCES,
    ),
    Probe(
        stage=None,
        target="flowledger.run.forward:micro_batch_forward",
        phase="forward",
        scope="call",
        args={"model": "@model", **{name: name for name in _SEQUENCES if name != "sample_id"}},
        results={name: name for name in ("new_log_prob", "entropy", "sum_pi_squared")},
    ),
    Probe(
        stage=None,
        target="flowledger.run.head:project_logits",
        scope="call",
        args={"hidden_states": "hidden_states"},
        results={"": "logits"},
    ),
    Probe(
        stage=None,
        target="flowledger.run.critic:values_micro_batch",
        phase="forward",  # without gradients it is nothing else
        scope="micro_batch",
        args=_SEQUENCES,
        results={"": "values"},
    ),
    Probe(
        stage=None,
        target="flowledger.run.value_model:token_values",
        phase="forward",
        scope="call",
        args={"model": "@model", **{name: name for name in _SEQUENCES if name != "sample_id"}},
    ),
    Probe(stage=None, target="flowledger.run.critic:critic_epoch", scope="epoch"),
    Probe(stage=None, target="flowledger.run.critic:critic_mini_batch", scope="mini_batch"),
    Probe(
        stage=None,
        target="flowledger.run.critic:critic_micro_batch",
        scope="micro_batch",
        args={**_SEQUENCES, **{name: name for name in ("loss_mask", "values", "returns")}},
    ),
    Probe(
        stage=None,
        target="flowledger.run.critic:critic_loss",
        phase="loss",
        scope="call",
        args={name: name for name in ("sample_id", "values", "returns", "loss_mask")},
        results={"value_loss": "value_loss"},
    ),
    Probe(stage=None, target="flowledger.run.update:epoch", scope="epoch"),
    Probe(stage=None, target="flowledger.run.update:mini_batch", scope="mini_batch"),
    Probe(
        stage=None,
        target="flowledger.run.update:micro_batch",
        scope="micro_batch",
        args={
            **_SEQUENCES,
            **{
                name: name
                for name in ("loss_mask", "old_log_prob", "ref_log_prob", "advantages", "rollout_is_weights")
            },
        },
    ),
    Probe(
        stage=None,
        target="flowledger.run.loss:micro_batch_loss",
        phase="loss",
        scope="call",
        args={
            name: name
            for name in (
                "sample_id", "new_log_prob", "entropy", "old_log_prob", "ref_log_prob", "advantages", "loss_mask",
                "rollout_is_weights",
            )
        },
        results={
            "loss_mat": "loss_mat",
            "kl": "kl",
            "loss": "@scalar:loss_term/total",
            "policy_loss": "policy_loss & @scalar:loss_term/policy",
            "kl_loss": "kl_loss & @scalar:loss_term/kl",
            "entropy_loss": "entropy_loss & @scalar:loss_term/entropy",
            "ratio": "@token:ratio",
            "clipped": "@token:clipped",
            "loss_share": "@token:loss_share",
        },
    ),
    Probe(
        stage=None,
        target="flowledger.run.parallel.schedules:stage_forward",
        phase="forward",
        scope="call",
        args={"micro_batch": "@micro_batch"},
    ),
    Probe(
        stage=None,
        target="flowledger.run.parallel.schedules:stage_backward",
        phase="backward",
        scope="call",
        args={"micro_batch": "@micro_batch"},
    ),
    Probe(
        stage=None,
        target="flowledger.run.update:micro_batch_backward",
        phase="backward",
        scope="call",
        results={"args.model": "grads"},
    ),
    Probe(
        stage=None,
        target="flowledger.run.update:optimizer_step",
        phase="step",
        scope="call",
        args={"model": "grads", "optimizer": "optimizer_state"},
        results={"": "grad_norm", "args.model": "params", "args.optimizer": "optimizer_state"},
    ),
)  # fmt: skip
