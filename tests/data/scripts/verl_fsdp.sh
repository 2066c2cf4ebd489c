#!/usr/bin/env bash
# GRPO on 8 GPUs with FSDP; overrides in one long command.
set -x

export VLLM_USE_V1=1
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
DATA=${DATA:-"$HOME/data/gsm8k"}
train_files="['$DATA/train.parquet', '$DATA/extra.parquet']"
prompts=1024
max_prompt_length=$((1024 * 1))
max_response_length=$((1024 * 2))

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$train_files" \
    data.val_files=$DATA/test.parquet \
    data.train_batch_size=${prompts} \
    data.max_prompt_length=$max_prompt_length \
    data.max_response_length="${max_response_length}" \
    actor_rollout_ref.model.path=$MODEL_PATH \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=$((32 / 2)) \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((max_prompt_length + max_response_length) * 4)) \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    +actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    trainer.logger='["console","wandb"]' \
    trainer.project_name='verl_grpo_example' \
    trainer.experiment_name="qwen3 8b fsdp" \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 $@ 2>&1 | tee "train_$(basename "$MODEL_PATH").log"
