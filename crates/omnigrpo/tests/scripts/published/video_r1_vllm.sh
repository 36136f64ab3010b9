#!/bin/bash
cd src/r1-v
MODEL='SFT Model Path'
ROWS="./Video-R1-data/Video-R1-260k.json"
OUT="./log/Qwen2.5-VL-7B-Video-GRPO"
[ -d "$OUT" ] || mkdir -p "$OUT"
RUN="Qwen2.5-VL-7B-Video-GRPO"; STAGE="local_scripts/zero3.json"
CUDA_VISIBLE_DEVICES="0,1,2,3,4" torchrun --nproc_per_node="4" src/open_r1/grpo.py \
  --attn_implementation flash_attention_2 --beta 0.04 \
  --bf16 true --dataset_name ${ROWS} \
  --deepspeed ${STAGE} --gradient_accumulation_steps 1 \
  --gradient_checkpointing true --learning_rate 1e-6 \
  --len_control true --logging_steps 1 \
  --lr_scheduler_type "cosine" --max_completion_length 768 \
  --max_grad_norm 5 --max_pixels 501760 \
  --max_prompt_length 16384 --min_pixels 3136 \
  --model_name_or_path ${MODEL} --num_generations 8 \
  --num_train_epochs 1 --output_dir ${OUT} \
  --per_device_train_batch_size 1 --report_to wandb \
  --run_name ${RUN} --save_only_model false \
  --save_steps 100 --temperature 1.0 \
  --temporal true --use_vllm true \
  --vllm_device "cuda:4" --vllm_gpu_memory_utilization 0.7 \
  --weight_decay 0.01
