#!/bin/bash
MASTER_ADDR=${MASTER_ADDR:-"127.0.0.1"}
MASTER_PORT=${MASTER_PORT:-$(shuf -i 20001-29999 -n 1)}
NPROC_PER_NODE=2
deepspeed=./scripts/zero3.json
llm=Qwen/Qwen2.5-VL-3B-Instruct
lr=2e-5
batch_size=1
grad_accum_steps=8
entry_file=qwenvl/train/train_grpo.py
datasets=assy07_grpo
run_name="qwen2.5-vl-grpo"
output_dir=./output/${run_name}

args="
    --deepspeed ${deepspeed} \
    --model_name_or_path "${llm}" \
    --dataset_use ${datasets} \
    --data_flatten True \
    --tune_mm_vision False \
    --tune_mm_mlp True \
    --tune_mm_llm True \
    --bf16 \
    --output_dir ${output_dir} \
    --num_train_epochs 3 \
    --per_device_train_batch_size ${batch_size} \
    --gradient_accumulation_steps ${grad_accum_steps} \
    --max_pixels 451584 \
    --min_pixels 12544 \
    --eval_strategy "no" \
    --save_strategy "steps" \
    --save_steps 100 \
    --learning_rate ${lr} \
    --weight_decay 0.1 \
    --warmup_ratio 0.03 \
    --lr_scheduler_type "cosine" \
    --logging_steps 10 \
    --model_max_length 2048 \
    --gradient_checkpointing True \
    --dataloader_num_workers 4 \
    --grpo_alpha 0.5 \
    --grpo_beta 0.1 \
    --format_reward_weight 0.3 \
    --accuracy_reward_weight 0.7 \
    --generation_max_length 512 \
    --generation_temperature 0.7 \
    --generation_top_p 0.9 \
    --grpo_sample_size 4 \
    --run_name ${run_name} \
    --report_to wandb"

torchrun --nproc_per_node=${NPROC_PER_NODE} \
         --master_addr=${MASTER_ADDR} \
         --master_port=${MASTER_PORT} \
         ${entry_file} ${args}
