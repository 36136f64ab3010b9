cd src/r1-v
export HF_HOME=/data/cache
WANDB_MODE=offline torchrun --nproc_per_node="8" --nnodes="1" src/open_r1/grpo.py \
  --attn_implementation flash_attention_2 --bf16 \
  --dataset_name /data/clevr_cogen_a_train --deepspeed local_scripts/zero3.json \
  --gradient_accumulation_steps 2 --gradient_checkpointing false \
  --logging_steps 1 --max_completion_length 512 \
  --max_pixels 401408 --max_prompt_length 512 \
  --model_name_or_path /models/finetune_HumanOmni_1B_Omni_emer_withchoice --num_generations 8 \
  --num_train_epochs 2 --output_dir ./outputs/test_humanomni_emer_1format_withpath_withchoice/ \
  --per_device_train_batch_size 1 --report_to wandb \
  --run_name Qwen2-VL-2B-GRPO-emotion --save_only_model true \
  --save_steps 1000
