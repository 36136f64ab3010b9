#!/usr/bin/env bash
# Questions about details of images, which a tool enlarges: one row per line, {"image": …, "problem": …, "solution": …}.
set -euo pipefail
exec "${OMNIGRPO:-omnigrpo}" train --preset deepeyes \
    --model_name_or_path "${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}" \
    --train_file "${DATA:-rows.jsonl}" \
    --output_dir "${OUTPUT:-runs/deepeyes}" \
    "$@"
