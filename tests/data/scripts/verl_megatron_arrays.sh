#!/bin/bash
set -euo pipefail
# Each section of the configuration is an array; the launch puts them together.
: "${NNODES:=2}"
: ${NGPUS_PER_NODE:=8}
TP=${TP:-4}; PP=${PP:-2}; CP=1
GPUS=$((NNODES * NGPUS_PER_NODE))

DATA=(
    data.train_batch_size=128
    data.max_prompt_length=2048      # tokens
    data.max_response_length=8192

    "data.train_files=[$HOME/dapo/train.parquet]"
)
MODEL=(actor_rollout_ref.model.path="${MODEL_ROOT:-/models}/Qwen3-30B-A3B" actor_rollout_ref.model.use_fused_kernels=False)
ACTOR=(
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${TP}
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=${PP}
    actor_rollout_ref.actor.megatron.context_parallel_size=$CP
    ++actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
    actor_rollout_ref.actor.ppo_mini_batch_size=$(( GPUS * 4 ))
)
if (( GPUS > 8 )); then
    ACTOR+=(actor_rollout_ref.actor.megatron.expert_model_parallel_size=8)
else
    ACTOR+=(actor_rollout_ref.actor.megatron.expert_model_parallel_size=4)
fi
[[ "${OFFLOAD:-True}" == "True" ]] && ACTOR+=(actor_rollout_ref.actor.megatron.param_offload=True "actor_rollout_ref.actor.megatron.optimizer_offload=True")
ROLLOUT=("actor_rollout_ref.rollout.name=${ROLLOUT_NAME:=vllm}" actor_rollout_ref.rollout.tensor_model_parallel_size=$TP)
EXTRA=()

LAUNCH=(uv run --isolated python3)
"${LAUNCH[@]}" -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml \
    "${DATA[@]}" \
    "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${EXTRA[@]}" \
    trainer.nnodes="$NNODES" trainer.n_gpus_per_node="$NGPUS_PER_NODE" \
    "$@"
echo "sections: ${#DATA[@]} ${#ACTOR[@]}"
