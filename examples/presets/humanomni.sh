#!/usr/bin/env bash
# Emotions in clips with sound: {"video": …, "conversations": […]} with the label as the answer.
# MODEL is a checkpoint after a cold start with `omnigrpo sft`.
set -euo pipefail
exec "${OMNIGRPO:-omnigrpo}" train --preset humanomni \
    --model_name_or_path "${MODEL:-EMER-SFT-0.5B}" \
    --train_file "${DATA:-mafw-dfew.json}" \
    --video_folders "${VIDEOS:-.}" \
    --output_dir "${OUT:-runs/humanomni}" \
    "$@"
