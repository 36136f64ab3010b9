NPROC_PER_NODE=8 \
MAX_PIXELS=1003520 \
swift rlhf \
  --dataloader_num_workers 4 --dataset AI-ModelScope/chartqa_digit_r1v_format --gradient_accumulation_steps 1 \
  --learning_rate 1e-6 --load_from_cache_file true --logging_steps 5 \
  --max_completion_length 1024 --model Qwen/Qwen2.5-VL-7B-Instruct --num_generations 8 \
  --num_train_epochs 1 --output_dir output --per_device_eval_batch_size 1 \
  --per_device_train_batch_size 1 --reward_funcs accuracy format --rlhf_type grpo \
  --save_total_limit 2 --sleep_level 1 --system examples/train/grpo/prompt.txt \
  --temperature 1.0 --top_p 0.85 --torch_dtype bfloat16 \
  --tuner_type lora --use_vllm true --vllm_gpu_memory_utilization 0.5 \
  --vllm_mode colocate --vllm_tensor_parallel_size 4 --warmup_ratio 0.05
