MAX_PIXELS=602112 \
CUDA_VISIBLE_DEVICES=0,1,2 \
NPROC_PER_NODE=3 \
swift rlhf \
  --beta 0 --dataloader_num_workers 4 --dataset "path/to/data_0.1.2_visual_toolbox_v2.parquet" "path/to/data_v0.8_visual_toolbox_v2.parquet" "path/to/data_thinklite_reasoning_acc.parquet" \
  --dataset_num_proc 4 --deepspeed zero3 --external_plugins examples/train/grpo/plugin/deepeyes/deepeyes_plugin.py \
  --gradient_accumulation_steps 4 --learning_rate 1e-6 --load_from_cache_file true \
  --log_completions true --logging_steps 5 --max_completion_length 2048 \
  --model Qwen/Qwen2.5-VL-7B-Instruct --num_generations 12 --num_train_epochs 1 \
  --offload_model true --offload_optimizer true --per_device_train_batch_size 1 \
  --report_to tensorboard swanlab --reward_funcs deepeyes_reward --rlhf_type grpo \
  --sleep_level 1 --temperature 0.9 --torch_dtype bfloat16 \
  --tuner_type full --use_vllm true --vllm_mode server \
  --vllm_server_host 127.0.0.1 --vllm_server_port 8001 --warmup_ratio 0.05
