MODEL="PATH_TO_QWEN_2B_CKPT"; ROWS="MMInstruction/Clevr_CoGenT_TrainA_70K_Complex"
OUT="OUTPUT_DIR"
RUN="RUN_NAME_FOR_WANDB"
CUDA_VISIBLE_DEVICES="0,1,2,3,4" torchrun --nproc_per_node="4" --nnodes="1" src/open_r1/grpo.py \
  --attn_implementation flash_attention_2 --bf16 \
  --dataset_name ${ROWS} --gradient_accumulation_steps 4 \
  --gradient_checkpointing true --logging_steps 1 \
  --max_completion_length 1024 --max_pixels 400000 \
  --max_prompt_length 512 --max_steps 13125 \
  --model_name_or_path ${MODEL} --num_generations 4 \
  --output_dir ${OUT} --per_device_train_batch_size 1 \
  --report_to wandb --run_name ${RUN} \
  --save_only_model true --save_steps 1000 \
  --temperature 1.0 --use_vllm True
