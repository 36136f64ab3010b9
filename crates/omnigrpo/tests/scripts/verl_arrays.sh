#!/usr/bin/env bash
set -xeuo pipefail

rollout_n=${ROLLOUT_N:-4}
DATA=(
    data.train_files="rows.jsonl"   # in the working directory
    data.train_batch_size=8
    data.max_response_length=256
)
ACTOR=(
    actor_rollout_ref.model.path="${MODEL_PATH:-Qwen/Qwen3-VL-4B-Instruct}"
    actor_rollout_ref.model.lora_rank=16
    actor_rollout_ref.model.lora_alpha=32
    actor_rollout_ref.actor.ppo_mini_batch_size=8
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.loss_agg_mode=token-mean
)
if [ "${DEBUG:-}" = 1 ]; then
    ACTOR+=(trainer.val_before_train=False)
fi

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    "${DATA[@]}" "${ACTOR[@]}" \
    actor_rollout_ref.rollout.n=${rollout_n} \
    algorithm.filter_groups.enable=True \
    trainer.total_epochs=1 "$@"
