#!/usr/bin/env bash
# Images or videos with short answers: one row per line, {"image": …, "problem": …, "solution": …}.
set -euo pipefail
exec "${OMNIGRPO:-omnigrpo}" train --preset r1-v \
    --model_name_or_path "${MODEL:-Qwen/Qwen2-VL-2B-Instruct}" \
    --train_file "${DATA:-rows.jsonl}" \
    --output_dir "${OUT:-runs/r1-v}" \
    "$@"
