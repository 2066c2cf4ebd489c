#!/bin/bash
#SBATCH --job-name=verl
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8

GPUS_PER_NODE=8
NODES=${SLURM_JOB_NUM_NODES:-2}
export WORLD_SIZE=$(($NODES * $GPUS_PER_NODE))
overrides="trainer.nnodes=$NODES trainer.n_gpus_per_node=$GPUS_PER_NODE"
srun --overlap --nodes=1 --ntasks=1 -w node01 bash -c "cd /tmp && python3 -m verl.trainer.main_ppo \
    $overrides actor_rollout_ref.rollout.name=vllm \
    data.train_batch_size=\$((WORLD_SIZE * 16)) \
    'trainer.experiment_name=two words' trainer.default_local_dir=\$HOME/ckpt"
