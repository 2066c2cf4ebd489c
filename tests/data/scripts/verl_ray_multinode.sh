#!/usr/bin/env bash
# The head starts ray and submits; workers join.
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:?set MASTER_ADDR to the head node}
NUM_NODES=${NUM_NODES:-4}
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
if [[ "$NODE_RANK" -ne 0 ]]; then
    ray start --address="$MASTER_ADDR:6379" --block
    exit 0
fi
ray start --head --port=6379 --num-gpus=8 --disable-usage-stats
RUNTIME_ENV_JSON="{
  \"env_vars\": {
    \"PYTHONPATH\": \"/opt/Megatron-LM/\",
    \"MASTER_ADDR\": \"${MASTER_ADDR}\"
  }
}"
cat > /dev/null <<EOF
working_dir: ${SCRIPT_DIR}
excludes: ["/.git/"]
python3 -m not.a.launch $NUM_NODES
EOF
ARGS="trainer.nnodes=$NUM_NODES trainer.n_gpus_per_node=8"
ARGS="$ARGS data.train_batch_size=$((NUM_NODES * 64))"
ARGS+=" actor_rollout_ref.rollout.name=vllm"
ARGS+=" trainer.project_name=${PROJECT_NAME-multi}"
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 -m verl.trainer.main_ppo $ARGS \
   hydra.searchpath="[file://$SCRIPT_DIR/config]" \
   actor_rollout_ref.model.path="${MODEL:-deepseek-ai/DeepSeek-V3}"
