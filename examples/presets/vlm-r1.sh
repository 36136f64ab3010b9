#!/usr/bin/env bash
# Questions about images as VLM-R1 trains on them. DATA and IMAGES may be lists with colons; METHOD names a rule of
# accuracy per file (`omnigrpo rewards list`), and TASK is rec, ic or odLength where the task has wording of its own.
set -euo pipefail
exec "${OMNIGRPO:-omnigrpo}" train --preset vlm-r1 \
    --model_name_or_path "${MODEL:-Qwen/Qwen2.5-VL-3B-Instruct}" \
    --data_file_paths "${DATA:-rows.jsonl}" \
    --image_folders "${IMAGES:-images}" \
    --reward_method "${METHOD:-default}" \
    --task_type "${TASK:-default}" \
    --output_dir "${OUTPUT:-runs/vlm-r1}" \
    "$@"
