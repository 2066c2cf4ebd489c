#!/bin/bash
set -e
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
IFS=',' read -ra SEEDS <<< "${SEED_LIST:-1,2,3}"
DISTRIBUTED_ARGS="
    --nproc_per_node $GPUS_PER_NODE
    --nnodes ${NNODES:-1}
    --master_port $((29500 + RANDOM_PORT))
"
declare -i n=0
for seed in "${SEEDS[@]}"; do
    for ((i = 0; i < 2; i++)); do
        n=$((n + 1))
        [ $i -eq 1 ] && [ "$seed" != 2 ] && continue
        OUT=runs/$(printf 'seed%03d-%s' "$seed" "$i")
        torchrun $DISTRIBUTED_ARGS train.py --seed "$seed" --output_dir "${OUT//\//_}" --n $n --tail ${OUT: -1} --first "${SEEDS[0]}" --last ${SEEDS[-1]} "${@:2}"
    done
done
until [ $n -ge 10 ]; do ((n += 4)); done
eval "torchrun --nnodes 1 last.py --n \$n '${1:-none}'"
