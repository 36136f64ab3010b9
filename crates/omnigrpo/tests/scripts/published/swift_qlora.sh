ASK="Solve it step by step.
For example: #### 42"
CUDA_VISIBLE_DEVICES=0,1,2,3 \
NPROC_PER_NODE=4 \
swift rlhf \
  --bnb_4bit_quant_type nf4 --columns '{"answer": "solution"}' --dataloader_num_workers 4 \
  --dataset 'modelscope/gsm8k' --deepspeed zero2 --enable_thinking false \
  --epsilon 0.2 --epsilon_high 0.28 --external_plugins examples/train/grpo/plugin/gsm8k/gsm8k_plugin.py \
  --gradient_accumulation_steps 4 --learning_rate 1e-5 --load_from_cache_file true \
  --log_completions true --logging_steps 1 --lr_scheduler_type cosine \
  --max_completion_length 8192 --max_grad_norm 1.0 --max_length 2048 \
  --model Qwen/Qwen2.5-3B-Instruct --num_generations 8 --num_train_epochs 1 \
  --per_device_train_batch_size 4 --quant_bits 4 --quant_method bnb \
  --report_to tensorboard swanlab --reward_funcs gsm8k_accuracy gsm8k_format --rlhf_type grpo \
  --save_steps 10 --save_total_limit 100 --scale_rewards none \
  --sleep_level 1 --system "${ASK}" --temperature 1.0 \
  --torch_dtype bfloat16 --tuner_type lora --use_vllm true \
  --vllm_enable_lora true --vllm_gpu_memory_utilization 0.4 --vllm_max_model_len 10240 \
  --vllm_mode colocate --vllm_tensor_parallel_size 1 --warmup_ratio 0.0
