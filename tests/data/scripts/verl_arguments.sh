#!/bin/bash
# usage: verl_arguments.sh <gpus> <save path> [more overrides ...]
if [ "$#" -lt 2 ]; then
    echo "Usage: $0 <nproc_per_node> <save_path> [other_configs...]"
    exit 1
fi
nproc_per_node=$1
save_path=$2
shift 2

torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node \
     -m verl.trainer.fsdp_sft_trainer \
    data.micro_batch_size_per_gpu=4 \
    trainer.default_local_dir=$save_path \
    trainer.experiment_name=sft-${save_path##*/} \
    trainer.total_epochs=4 "$@"
