#!/usr/bin/env bash
# Functions, case and options of the script itself.
size=8b
dry=0
while [[ $# -gt 0 ]]; do
    case "$1" in
        --size) size="$2"; shift 2 ;;
        --size=*) size="${1#*=}"; shift ;;
        --dry|-n) dry=1; shift ;;
        --) shift; break ;;
        *) break ;;
    esac
done

model_of() {
    local which=$1
    case "$which" in
        0.6b|1.7b|4b | 8b) echo "Qwen/Qwen3-${which^^}" ;;
        30b*) echo Qwen/Qwen3-30B-A3B ;;
        *) echo "unknown size: $which" >&2; return 1 ;;
    esac
}

batch_for() {
    if [ "$1" = "8b" ] || [ "$1" = "4b" ]; then echo 16
    elif [[ $1 =~ ^30b(-a3b)?$ ]]; then echo 4
    else
        echo 32
    fi
}

launch() {
    local name="$1"; shift
    local -a common=(trainer.experiment_name="$name" trainer.save_freq=-1)
    python3 -m verl.trainer.main_ppo "${common[@]}" "$@"
}

MODEL=$(model_of "$size")
micro=`batch_for $size`
lrs="1e-6 5e-7"
for lr in $lrs; do
    launch "lr-$lr" actor_rollout_ref.model.path="$MODEL" \
        actor_rollout_ref.actor.optim.lr=$lr \
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=$micro \
        +trainer.dry_run=$dry actor_rollout_ref.rollout.name=vllm "$@"
done
