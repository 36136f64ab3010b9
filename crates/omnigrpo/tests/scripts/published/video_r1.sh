cd src/r1-v
CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node="4" --nnodes="1" --master_port="12365" \
  src/open_r1/grpo.py \
  --attn_implementation flash_attention_2 --beta 0.04 \
  --bf16 --dataset_name "./Video-R1-data/Video-R1-260k.json" \
  --deepspeed local_scripts/zero3.json --gradient_accumulation_steps 1 \
  --gradient_checkpointing true --learning_rate 1e-6 \
  --len_control true --logging_steps 1 \
  --lr_scheduler_type "cosine" --max_completion_length 768 \
  --max_grad_norm 5 --max_pixels 401408 \
  --max_prompt_length 16384 --model_name_or_path 'SFT Model Path' \
  --num_generations 8 --num_train_epochs 1 \
  --output_dir "./log/Qwen2.5-VL-7B-GRPO" --per_device_train_batch_size 1 \
  --run_name Video-R1 --save_only_model false \
  --save_steps 100 --temporal true \
  --weight_decay 0.01
