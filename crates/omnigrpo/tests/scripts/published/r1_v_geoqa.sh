MODEL=PATH_TO_QWEN25VL_3B_CKPT
ROWS=leonardPKU/GEOQA_R1V_Train_8K
OUT=OUTPUT_DIR
if [ ! -d "$OUT" ]; then
  mkdir -p "$OUT"
fi
RUN=RUN_NAME_FOR_WANDB
STAGE="src/r1-v/local_scripts/zero1_no_optimizer.json"
CUDA_VISIBLE_DEVICES="0,1,2,3,4" torchrun --nproc_per_node="4" --nnodes="1" \
  src/open_r1/grpo.py \
  --attn_implementation flash_attention_2 --bf16 true \
  --dataset_name ${ROWS} --deepspeed ${STAGE} \
  --gradient_accumulation_steps 4 --gradient_checkpointing true \
  --learning_rate 1e-6 --logging_steps 1 \
  --lr_scheduler_type "constant" --max_completion_length 2048 \
  --max_pixels 501760 --max_prompt_length 4096 \
  --min_pixels 3136 --model_name_or_path ${MODEL} \
  --num_generations 8 --num_train_epochs 2 \
  --output_dir ${OUT} --per_device_train_batch_size 1 \
  --report_to wandb --run_name ${RUN} \
  --save_only_model true --save_steps 200 \
  --save_total_limit 3 --temperature 1.0 \
  --use_vllm true --vllm_device "cuda:4" \
  --vllm_gpu_memory_utilization 0.8
