#!/usr/bin/env bash
# Sets of actions in videos. REGISTRY maps the names of --dataset_use to files and folders; see docs/datasets.md.
set -euo pipefail
exec "${OMNIGRPO:-omnigrpo}" train --preset qwen-video \
    --dataset_registry "${REGISTRY:-datasets.yaml}" \
    --dataset_use "${DATASETS:-assy07_grpo}" \
    --output_dir "${OUT:-runs/qwen-video}" \
    "$@"
