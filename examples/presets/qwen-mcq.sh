#!/usr/bin/env bash
# Multiple choice about videos; a dataset whose name contains "no_think" is asked to answer at once.
set -euo pipefail
exec "${OMNIGRPO:-omnigrpo}" train --preset qwen-mcq \
    --dataset_registry "${REGISTRY:-datasets.yaml}" \
    --dataset_use "${DATASETS:-mcq,mcq_no_think%50}" \
    --output_dir "${OUT:-runs/qwen-mcq}" \
    "$@"
