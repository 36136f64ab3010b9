pip install num2words==0.5.14
accelerate launch --config_file examples/missing/deepspeed_zero3.yaml examples/vlm.py \
  --dtype bfloat16 --gradient_accumulation_steps 2 --learning_rate 1e-5 --log_completions \
  --lora_target_modules "q_proj", "v_proj" --max_completion_length 1024 \
  --model_name_or_path HuggingFaceTB/SmolVLM2-2.2B-Instruct --num_generations 2 \
  --output_dir grpo-SmolVLM2-2.2B-Instruct --per_device_train_batch_size 1 --use_peft
