set -xeuo pipefail

project_name='one-step'
exp_name='qwen3-0.6b-2-and-6'

# where to submit
RAY_ADDRESS=${RAY_ADDRESS:-"http://localhost:8265"}
WORKING_DIR=${WORKING_DIR:-"${PWD}"}
RUNTIME_ENV=${RUNTIME_ENV:-"${WORKING_DIR}/verl/trainer/runtime_env.yaml"}
NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
n_gpus_rollout=2
n_gpus_training=$((NGPUS_PER_NODE - n_gpus_rollout))
TRAIN_FILE=${TRAIN_FILE:-"${RAY_DATA_HOME:-"${HOME}/verl"}/data/gsm8k/train.parquet"}
loss_agg_mode="token-mean"
enable_filter_groups=False
clip_ratio_low=0.2 clip_ratio_high=0.28

ray job submit --no-wait --runtime-env="${RUNTIME_ENV}" \
    --address "${RAY_ADDRESS}" --working-dir "${WORKING_DIR}" \
    -- python3 -m verl.experimental.one_step_off_policy.main_ppo \
    --config-path=config \
    --config-name='one_step_off_ppo_trainer.yaml' \
    data.train_files="${TRAIN_FILE}" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.clip_ratio_low=${clip_ratio_low} \
    actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_high} \
    actor_rollout_ref.actor.loss_agg_mode=${loss_agg_mode} \
    actor_rollout_ref.hybrid_engine=False \
    actor_rollout_ref.rollout.name=vllm \
    trainer.logger=['console','tensorboard'] \
    trainer.project_name="${project_name}" \
    trainer.experiment_name="${exp_name}" \
    trainer.nnodes="${NNODES}" trainer.n_gpus_per_node="${n_gpus_training}" \
    rollout.nnodes="${NNODES}" rollout.n_gpus_per_node="${n_gpus_rollout}" $@
