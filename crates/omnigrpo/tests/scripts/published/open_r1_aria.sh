#!/bin/bash
ports=($(echo $METIS_WORKER_0_PORT | tr ',' ' '))
port="$(echo "${METIS_WORKER_0_PORT:-2000}" | awk -F',' '{print $1}')"
echo "first: ${ports[0]}"
export RUN=Qwen-VL-2B-GRPO-$(date +%Y-%m-%d-%H-%M-%S)
torchrun --nproc_per_node="${ARNOLD_WORKER_GPU}" --nnodes="${ARNOLD_WORKER_NUM}" --master_port="${port}" \
  src/open_r1/grpo.py \
  --attn_implementation eager --bf16 \
  --dataset_name luodian/mini_cot_80k --deepspeed scripts/zero3.json \
  --gradient_accumulation_steps 1 --gradient_checkpointing true \
  --logging_steps 1 --max_prompt_length 8192 \
  --model_name_or_path rhymes-ai/Aria --num_train_epochs 1 \
  --output_dir Aria-GRPO-mini_cot_80k --per_device_train_batch_size 1 \
  --report_to wandb --run_name ${RUN} \
  --save_total_limit 8
