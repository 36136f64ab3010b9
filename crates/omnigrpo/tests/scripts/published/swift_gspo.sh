CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
NPROC_PER_NODE=8 \
swift rlhf \
  --beta 0.0 --dataloader_num_workers 4 --dataset AI-MO/NuminaMath-TIR#10000 \
  --deepspeed zero3 --epsilon 3e-4 --epsilon_high 4e-4 \
  --gradient_accumulation_steps 8 --importance_sampling_level sequence --learning_rate 1e-6 \
  --load_from_cache_file true --log_completions true --logging_steps 5 \
  --max_completion_length 8192 --model Qwen/Qwen2.5-7B-Instruct --num_generations 16 \
  --num_train_epochs 1 --offload_model true --offload_optimizer true \
  --per_device_train_batch_size 2 --reward_funcs accuracy --rlhf_type grpo \
  --save_steps 1000 --save_total_limit 2 --sleep_level 1 \
  --steps_per_generation 32 --torch_dtype bfloat16 --tuner_type full \
  --use_vllm true --vllm_gpu_memory_utilization 0.6 --vllm_max_model_len 16384 \
  --vllm_mode colocate --warmup_ratio 0.05
