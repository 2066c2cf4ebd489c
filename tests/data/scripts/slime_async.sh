#!/bin/bash
set -ex
BASE_DIR=${BASE_DIR:-/root}
SCRIPT_DIR=$(cd "$(dirname "$0")" && pwd)
MODEL_ARGS_ROTARY_BASE=5000000 source "$SCRIPT_DIR/models/qwen3-4B.sh"
ARGS=(
   --hf-checkpoint "$BASE_DIR/Qwen3-4B-Instruct"
   --rollout-batch-size 64 --n-samples-per-prompt 8 --num-steps-per-rollout 2
   --rollout-max-response-len 8192 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2
   --use-dynamic-batch-size --max-tokens-per-gpu 9216 --log-probs-max-tokens-per-gpu 16384
   --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2
   --advantage-estimator gspo --use-tis
   --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer
   --sglang-mem-fraction-static 0.8 --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 64)
)
PYTHONPATH="$BASE_DIR/Megatron-LM:${PYTHONPATH:-}" python3 "$BASE_DIR/slime/train_async.py" --actor-num-nodes 1 --actor-num-gpus-per-node 4 "${MODEL_ARGS[@]}" "${ARGS[@]}" ${EXTRA_ARGS:-}
