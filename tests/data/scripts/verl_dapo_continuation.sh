#!/usr/bin/env bash
set -x
# A comment inside a continued command ends the command, in bash as here.
N=16
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.n=${N} \
    data.train_batch_size=512 \
    # data.gen_batch_size=1536 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32

python3 -m verl.trainer.main_ppo data.a=1 `# an inline comment` \
    data.b='a'"b"c\ d \
    data.c= data.d="" $EMPTY "$EMPTY" "${UNSET_ARRAY[@]}" \
    data.e=$'tab\there' ~not_home data.f=\$HOME data.g="\$N\\" data.h={1,2}x data.i='{a: 1}' data.j=[1,2] data.k=a#b
