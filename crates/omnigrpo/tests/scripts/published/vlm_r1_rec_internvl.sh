#!/bin/bash
# The folder above that of this script has everything.
TOP="$( cd "$( dirname "${BASH_SOURCE[0]}" )/.." && pwd )"
export HOME_DIR="${TOP}"
ROWS="/data/rec_jsonsl_train/refcoco_train.jsonl:/data/rec_jsonsl_train/refcocop_train.jsonl:/data/rec_jsonsl_train/refcocog_train.jsonl"
PICTURES="/data/coco:/data/coco:/data/coco"
MODEL="OpenGVLab/InternVL2_5-4B-MPO"
OWN_REWARDS=True
export RUN="InternVL2_5-4B_MPO-rec"
TASK="rec"
cd ${HOME_DIR}/src/open-r1-multimodal
mkdir -p ${HOME_DIR}/runs/${RUN}/log
export LOG_PATH="${HOME_DIR}/runs/${RUN}/log/$(date "+%Y %m").txt"
torchrun --nnodes="1" --nproc_per_node="8" --node_rank="0" --master_port="12349" \
  src/open_r1/grpo_jsonl.py \
  --attn_implementation flash_attention_2 --beta 0.04 \
  --bf16 --data_file_paths ${ROWS} \
  --data_seed 42 --dataset-name this_is_not_used \
  --deepspeed ${HOME_DIR}/src/open-r1-multimodal/local_scripts/zero2.json --gradient_accumulation_steps 2 \
  --gradient_checkpointing true --image_folders ${PICTURES} \
  --is_reward_customized_from_vlm_module ${OWN_REWARDS} --logging_steps 1 \
  --max_anyres_num 6 --max_completion_length 2048 \
  --model_name_or_path ${MODEL} --num_generations 8 \
  --num_train_epochs 2 --output_dir ${HOME_DIR}/checkpoints/rl/${RUN} \
  --per_device_train_batch_size 8 --report_to wandb \
  --resume_from_checkpoint True --reward_funcs accuracy format \
  --run_name ${RUN} --save_steps 100 \
  --task_type ${TASK} --use_vllm False
echo "done: ${RUN}"
