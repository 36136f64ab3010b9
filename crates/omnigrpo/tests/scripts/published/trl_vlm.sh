accelerate launch --config_file examples/accelerate_zero3.yaml examples/vlm.py \
  --dtype bfloat16 --learning_rate 1e-5 --log_completions \
  --lora_target_modules "q_proj", "v_proj" --max_completion_length 1024 \
  --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --output_dir grpo-Qwen2.5-VL-3B-Instruct \
  --use_peft --use_vllm --vllm_mode colocate
