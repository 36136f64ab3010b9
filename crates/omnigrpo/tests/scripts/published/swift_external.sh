CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 \
env NPROC_PER_NODE=6 swift rlhf \
  --beta 0.04 --dataloader_num_workers 4 --dataset AI-MO/NuminaMath-TIR#1000 \
  --dataset_num_proc 4 --deepspeed zero2 --gradient_accumulation_steps 2 \
  --learning_rate 1e-6 --load_from_cache_file true --log_completions true \
  --logging_steps 1 --max_completion_length 2048 --model Qwen/Qwen2.5-7B-Instruct \
  --num_generations 8 --num_iterations 1 --num_train_epochs 3 \
  --per_device_train_batch_size 2 --report_to tensorboard wandb --reward_funcs accuracy \
  --rlhf_type grpo --save_total_limit 2 --split_dataset_ratio 0 \
  --temperature 1.0 --top_k 50 --top_p 0.9 \
  --torch_dtype bfloat16 --tuner_type full --use_vllm true \
  --vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port 8000 \
  --warmup_ratio 0.05
