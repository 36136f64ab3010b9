MAX_PIXELS=602112 \
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
NPROC_PER_NODE=8 \
swift rlhf \
  --attn_impl flash_attn --dataloader_num_workers 4 --dataset lmms-lab/multimodal-open-r1-8k-verified#1000 \
  --deepspeed zero3 --eval_steps 500 --external_plugins examples/train/grpo/plugin/plugin.py \
  --gradient_accumulation_steps 1 --learning_rate 1e-6 --load_from_cache_file true \
  --log_completions true --logging_steps 1 --max_completion_length 2048 \
  --max_length 8192 --model Qwen/Qwen2.5-VL-72B-Instruct --move_model_batches 40 \
  --num_generations 8 --num_train_epochs 1 --offload_model true \
  --offload_optimizer true --per_device_eval_batch_size 1 --per_device_train_batch_size 1 \
  --report_to wandb --reward_funcs external_r1v_acc format --reward_weights 1 0.1 \
  --rlhf_type grpo --save_steps 500 --save_total_limit 2 \
  --sleep_level 1 --system examples/train/grpo/prompt.txt --temperature 1.1 \
  --top_k 80 --top_p 1.0 --torch_dtype bfloat16 \
  --tuner_type lora --use_vllm true --vllm_gpu_memory_utilization 0.5 \
  --vllm_max_model_len 8192 --vllm_mode colocate --vllm_tensor_parallel_size 4 \
  --warmup_ratio 0.05
