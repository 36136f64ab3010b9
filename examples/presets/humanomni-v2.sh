#!/usr/bin/env bash
# Questions about clips with sound, answered in <context>, <think> and <answer>: {"video": …, "audio": …, "problem": …, "solution": …}.
# HumanOmniV2 adds a judge of context and reasoning: --reward_funcs accuracy format judge:URL --judge_prompt FILE.
set -euo pipefail
exec "${OMNIGRPO:-omnigrpo}" train --preset humanomni-v2 \
    --model_name_or_path "${MODEL:-Qwen2.5-Omni-7B}" \
    --train_file "${DATA:-intent.jsonl}" \
    --video_folders "${VIDEOS:-.}" \
    --audio_folders "${SOUNDS:-.}" \
    --output_dir "${OUT:-runs/humanomni-v2}" \
    "$@"
