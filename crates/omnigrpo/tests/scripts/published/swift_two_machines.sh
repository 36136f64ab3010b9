export NNODES=2 NODE_RANK=0
export MASTER_PORT=29500
export NPROC_PER_NODE=4
swift rlhf \
  --dataloader_num_workers 4 --dataset 'AI-MO/NuminaMath-TIR#5000' --dataset_num_proc 4 \
  --deepspeed zero2 --eval_steps 200 --gradient_accumulation_steps 2 \
  --learning_rate 1e-6 --load_from_cache_file true --log_completions true \
  --logging_steps 5 --max_completion_length 2048 --max_length 4096 \
  --model Qwen/Qwen2.5-Math-7B --num_generations 8 --num_train_epochs 1 \
  --output_dir output --per_device_eval_batch_size 1 --per_device_train_batch_size 1 \
  --reward_funcs accuracy format --rlhf_type grpo --save_steps 200 \
  --save_total_limit 2 --system 'examples/train/grpo/prompt.txt' --temperature 0.9 \
  --torch_dtype bfloat16 --tuner_type full --use_vllm true \
  --vllm_gpu_memory_utilization 0.5 --vllm_max_model_len 4096 --vllm_mode colocate \
  --warmup_ratio 0.05
