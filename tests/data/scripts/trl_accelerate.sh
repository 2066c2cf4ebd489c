#!/bin/sh
# TRL GRPO through accelerate, with a DeepSpeed file
CONFIG=${ACCELERATE_CONFIG:-deepspeed_zero3}
case $CONFIG in
  deepspeed_zero*) EXTRA="--gradient_checkpointing --bf16" ;;
  fsdp?) EXTRA='--bf16' ;;
esac
ACCELERATE_LOG_LEVEL=info accelerate launch --config_file recipes/accelerate_configs/"$CONFIG".yaml \
  --num_processes=7 src/open_r1/grpo.py \
  --model_name_or_path "Qwen/Qwen2.5-1.5B-Instruct" --output_dir 'out dir' \
  --per_device_train_batch_size=16 --num_generations 16 $EXTRA \
  --use_vllm True --system_prompt "You are a \"helpful\" assistant.
Answer in <answer> tags."
