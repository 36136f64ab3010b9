pip install transformers -U

ENABLE_AUDIO_OUTPUT=1 \
CUDA_VISIBLE_DEVICES=0,1,2,3 \
MAX_PIXELS=1003520 \
NPROC_PER_NODE=4 \
swift rlhf \
  --dataloader_num_workers 4 --dataset lmms-lab/multimodal-open-r1-8k-verified#1000 --dataset_num_proc 4 \
  --deepspeed zero2 --eval_steps 100 --external_plugins examples/train/grpo/plugin/plugin.py \
  --gradient_accumulation_steps 1 --learning_rate 1e-5 --load_from_cache_file true \
  --log_completions true --logging_steps 5 --lora_alpha 32 \
  --lora_rank 8 --max_completion_length 2048 --max_length 8192 \
  --model Qwen/Qwen2.5-Omni-7B --num_generations 8 --num_train_epochs 1 \
  --output_dir output --per_device_eval_batch_size 2 --per_device_train_batch_size 2 \
  --reward_funcs external_r1v_acc format --reward_weights 1 0.5 --rlhf_type grpo \
  --save_steps 100 --save_total_limit 2 --system 'examples/train/grpo/prompt.txt' \
  --target_modules all-linear --temperature 1. --top_k 50 \
  --top_p 0.99 --torch_dtype bfloat16 --tuner_type lora \
  --warmup_ratio 0.05
