#!/bin/bash
# Ascend: a sourced environment that is not on this machine, and sizes from one table.
source /usr/local/Ascend/ascend-toolkit/set_env.sh 2>/dev/null
export HCCL_CONNECT_TIMEOUT=1500 HCCL_HOST_SOCKET_PORT_RANGE=60000-60050
export TASK_QUEUE_ENABLE=1
declare -A TP_OF=([8b]=2 [32b]=8)
SIZE=${1:-32b}
shift || true
gen_tp=${TP_OF[$SIZE]}
python3 -m verl.trainer.main_ppo \
    trainer.device=npu actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size="${gen_tp}" \
    actor_rollout_ref.model.path=/data/Qwen3-${SIZE^^} \
    actor_rollout_ref.actor.entropy_from_logits_with_chunking=True \
    actor_rollout_ref.actor.fsdp_config.forward_prefetch=True \
    actor_rollout_ref.actor.fsdp_config.offload_policy=True \
    data.val_files="[/data/aime24.parquet,/data/aime25.parquet]" \
    custom_reward_function.path=null \
    trainer.val_before_train=${VAL:-False} ${*:+"$@"}
