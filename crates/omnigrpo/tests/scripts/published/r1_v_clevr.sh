cd src/r1-v
export DEBUG_MODE="true"
torchrun --nproc_per_node="8" --nnodes="1" --node_rank="0" \
  src/open_r1/grpo.py \
  --attn_implementation flash_attention_2 --bf16 \
  --dataset_name <PATH-TO-DATASET> --gradient_accumulation_steps 2 \
  --gradient_checkpointing false --logging_steps 1 \
  --max_pixels 401408 --max_prompt_length 1024 \
  --model_name_or_path <PATH-TO-Qwen2-VL-2B-Instruct> --num_train_epochs 2 \
  --output_dir <OUTPUT_DIR> --per_device_train_batch_size 1 \
  --report_to wandb --run_name Qwen2-VL-2B-GRPO-CLEVR-70k \
  --save_only_model true --save_steps 100
