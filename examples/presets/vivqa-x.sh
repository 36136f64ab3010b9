#!/usr/bin/env bash
# Vietnamese answers with explanations. DATA is made by
#   omnigrpo data convert vivqa-x --input ViVQA-X_train.json --output ViVQA-X_train_grpo.jsonl
# and IMAGES is COCO's train2014.
set -euo pipefail
export DS_SKIP_CUDA_CHECK=1
exec "${OMNIGRPO:-omnigrpo}" train --preset vivqa-x \
    --model_name_or_path "${MODEL:-OpenGVLab/InternVL3-1B}" \
    --data_file_paths "${DATA:-ViVQA-X_train_grpo.jsonl}" \
    --image_folders "${IMAGES:-train2014}" \
    --exp_name "${EXP_NAME:-vivqa-x}" \
    "$@"
