export WANDB_MODE=offline
torchrun --nproc_per_node=8 --nnodes=1 \
    src/open_r1/grpo.py \
    --output_dir ./outputs/test_humanomni/ \
    --model_name_or_path EMER-SFT-0.5B \
    --dataset_name DFEW_all \
    --deepspeed local_scripts/zero3.json \
    --max_prompt_length 512 \
    --max_completion_length 512 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 2 \
    --logging_steps 1 \
    --bf16 \
    --report_to wandb \
    --gradient_checkpointing false \
    --attn_implementation flash_attention_2 \
    --max_pixels 401408 \
    --num_train_epochs 2 \
    --run_name Qwen2-VL-2B-GRPO-emotion \
    --save_steps 1000 \
    --save_only_model true \
    --num_generations 8
