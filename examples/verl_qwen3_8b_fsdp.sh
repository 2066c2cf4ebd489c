#!/usr/bin/env bash
# GRPO on Qwen3-8B with verl: FSDP, dynamic batches, vLLM on the same 8 GPUs. Never executed by flowledger, only read:
#
#   flowledger plan examples/verl_qwen3_8b_fsdp.sh --gpu h100-80g
#   flowledger check examples/verl_qwen3_8b_fsdp.sh actor_rollout_ref.rollout.tensor_model_parallel_size=3
set -euo pipefail

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k}
NNODES=${NNODES:-1}
PROMPT_TOKENS=1024
RESPONSE_TOKENS=8192
BUDGET=$((2 * (PROMPT_TOKENS + RESPONSE_TOKENS)))

DATA=(
    data.train_files="$DATA_DIR/train.parquet"
    data.val_files="$DATA_DIR/test.parquet"
    data.train_batch_size=256
    data.max_prompt_length=$PROMPT_TOKENS
    data.max_response_length=$RESPONSE_TOKENS
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$BUDGET
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
)

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    "${DATA[@]}" \
    "${ACTOR[@]}" \
    "${ROLLOUT[@]}" \
    trainer.project_name=flowledger \
    trainer.experiment_name=qwen3_8b_fsdp \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes="$NNODES" \
    "$@"
