#!/usr/bin/env bash
# The defaults of TRL's GRPOConfig: beta 0, the recipe dapo, batches counted in completions.
set -euo pipefail
exec "${OMNIGRPO:-omnigrpo}" train --preset trl \
    --model_name_or_path "${MODEL:-Qwen/Qwen2.5-VL-3B-Instruct}" \
    --train_file "${DATA:-rows.jsonl}" \
    --output_dir "${OUTPUT:-runs/trl}" \
    "$@"
