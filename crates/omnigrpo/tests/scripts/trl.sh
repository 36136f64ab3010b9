#!/bin/bash
# A VLM with adapters on four cards.
accelerate launch \
    --config_file configs/zero3.yaml \
    --num_processes 4 \
    examples/scripts/grpo_vlm.py \
    --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
    --dataset_name me/geometry \
    --output_dir runs/geometry \
    --learning_rate 1e-5 \
    --gradient_checkpointing \
    --dtype bfloat16 \
    --max_prompt_length 2048 \
    --max_completion_length 1024 \
    --use_vllm \
    --vllm_mode colocate \
    --use_peft \
    --lora_target_modules "q_proj", "v_proj" \
    --per_device_train_batch_size 2 \
    --num_generations 8 \
    --log_completions
