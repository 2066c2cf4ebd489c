#!/usr/bin/env bash
set -xeuo pipefail
rollout_mode="async"
rollout_name="vllm"
if [ "$rollout_mode" = "async" ]; then
    export VLLM_USE_V1=1
    return_raw_chat="True"
fi
adv_estimator=grpo
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 28))
use_dynamic_bsz=True
actor_ppo_max_token_len=$(((max_prompt_length + max_response_length) * 1))
infer_ppo_max_token_len=$(((max_prompt_length + max_response_length) * 1))
sp_size=4
top_k=-1 # off
NNODES_ROLLOUT=${NNODES_ROLLOUT:-1}
NNODES_TRAIN=${NNODES_TRAIN:-1}
total_rollout_steps=$(((400*128)))
staleness_threshold=0.1
test_freq=20
exp_name=async_7b_28k_$((NNODES_ROLLOUT * 8))-$((NNODES_TRAIN*8))

PYTHONUNBUFFERED=1 CUDA_DEVICE_MAX_CONNECTIONS=1 nohup python -m verl.experimental.fully_async_policy.fully_async_main \
    data.train_batch_size=0 \
    data.gen_batch_size=1 \
    data.return_raw_chat=${return_raw_chat} \
    algorithm.adv_estimator=${adv_estimator} \
    actor_rollout_ref.actor.use_dynamic_bsz=${use_dynamic_bsz} \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${actor_ppo_max_token_len} \
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=${infer_ppo_max_token_len} \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=${sp_size} \
    actor_rollout_ref.rollout.top_k=${top_k} \
    actor_rollout_ref.rollout.name=$rollout_name \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config='{cudagraph_mode: FULL}' \
    rollout.total_rollout_steps="${total_rollout_steps}" \
    trainer.test_freq="${test_freq}" trainer.experiment_name="${exp_name}" \
    async_training.staleness_threshold="${staleness_threshold}" > "${exp_name}.log" 2>&1 &
wait
