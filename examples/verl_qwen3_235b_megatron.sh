#!/usr/bin/env bash
# GRPO on Qwen3-235B-A22B with verl and Megatron: 128 nodes of 8, tp 4, pp 8, cp 2, ep 32. Read by flowledger, never executed:
#
#   flowledger plan examples/verl_qwen3_235b_megatron.sh --gpu h100-80g --wide
set -euo pipefail

NNODES=${NNODES:-128}

MEGATRON=(
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=8
    actor_rollout_ref.actor.megatron.context_parallel_size=2
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=32
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.megatron.param_offload=True
    actor_rollout_ref.actor.megatron.optimizer_offload=True
    actor_rollout_ref.actor.megatron.grad_offload=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=11
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=11
)

python3 -m verl.trainer.main_ppo \
    model_engine=megatron \
    algorithm.adv_estimator=grpo \
    data.train_files="$HOME/data/dapo/train.parquet" \
    data.val_files="$HOME/data/dapo/test.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=2048 \
    data.max_response_length=16384 \
    actor_rollout_ref.model.path=Qwen/Qwen3-235B-A22B \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=18432 \
    actor_rollout_ref.actor.use_kl_loss=True \
    "${MEGATRON[@]}" \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=16 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes="$NNODES" \
    "$@"
