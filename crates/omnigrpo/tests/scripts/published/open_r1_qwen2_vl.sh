#!/bin/bash
ports=($(echo $METIS_WORKER_0_PORT | tr ',' ' '))
port="$(echo "${METIS_WORKER_0_PORT:-2000}" | awk -F',' '{print $1}')"
echo "first: ${ports[0]}"
export RUN=Qwen-VL-2B-GRPO-$(date +%Y-%m-%d-%H-%M-%S)
torchrun --nproc_per_node="${ARNOLD_WORKER_GPU}" --nnodes="${ARNOLD_WORKER_NUM}" --master_port="${port}" \
  src/open_r1/grpo.py \
  --attn_implementation flash_attention_2 --bf16 \
  --dataset_name luodian/${DATASET_NAME} --deepspeed scripts/zero3.json \
  --gradient_accumulation_steps 1 --gradient_checkpointing true \
  --logging_steps 1 --max_pixels 2359296 \
  --max_prompt_length 8192 --model_name_or_path Qwen/Qwen2-VL-2B-Instruct \
  --num_train_epochs 1 --output_dir checkpoints/${RUN} \
  --per_device_train_batch_size 1 --report_to wandb \
  --run_name ${RUN} --save_total_limit 8
