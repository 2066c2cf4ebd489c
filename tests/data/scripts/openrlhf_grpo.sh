set -x
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-4B}
SAVE_PATH="./exp/${MODEL_PATH#*/}"
NUM_GPUS=8

read -r -d '' unused <<EOF
openrlhf.cli.train_ppo_ray
EOF

ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json='{"working_dir": "/openrlhf"}' \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   --ref.num_nodes 1 \
   --ref.num_gpus_per_node $NUM_GPUS \
   --actor.num_nodes 1 \
   --actor.num_gpus_per_node $NUM_GPUS \
   --vllm.num_engines $((NUM_GPUS / 2)) \
   --vllm.tensor_parallel_size 2 \
   --train.colocate_all \
   --vllm.gpu_memory_utilization 0.7 \
   --vllm.enable_sleep \
   --ds.enable_sleep \
   --algo.advantage.estimator reinforce_baseline \
   --algo.kl.use_loss \
   --algo.kl.estimator k2 \
   --algo.kl.init_coef 1e-5 \
   --actor.model_name_or_path ${MODEL_PATH} \
   --reward.remote_url /openrlhf/rewards/math.py \
   --ckpt.output_dir ${SAVE_PATH} \
   --train.batch_size 1024 \
   --train.dynamic_batch_enable \
   --train.max_tokens_per_gpu 16384 \
   --rollout.batch_size 128 \
   --rollout.n_samples_per_prompt 8 \
   --data.max_len 8192 \
   --rollout.max_new_tokens 4096 \
   --ds.zero_stage 3 \
   --ds.param_dtype bf16 \
   --ds.packing_samples \
   --actor.gradient_checkpointing_enable \
   --actor.adam.lr 5e-7 \
   --actor.eps_clip_low_high 0.2 0.28 \
   --data.apply_chat_template
