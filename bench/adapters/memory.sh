#!/bin/sh
# Measures peak memory of two GRPO steps on random weights (122 million, float32): with all weights trained, with adapters on
# frozen weights, and with adapters on frozen weights in 8 and 4 bits. Needs only the built program:
#
#   cargo build --release && bench/adapters/memory.sh [target/release/omnigrpo]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
program=$(realpath "${1:-$here/../../target/release/omnigrpo}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cp -r "$here/../../crates/models/tests/golden/checkpoints/qwen2_5_vl_tied" model
rm model/model.safetensors
sed -i -e '0,/"hidden_size": 64/s//"hidden_size": 1024/' -e 's/"intermediate_size": 80/"intermediate_size": 4096/' \
    -e 's/"num_hidden_layers": 2/"num_hidden_layers": 8/' -e 's/"num_attention_heads": 4/"num_attention_heads": 16/' \
    -e 's/"num_key_value_heads": 2/"num_key_value_heads": 4/' -e 's/"out_hidden_size": 64/"out_hidden_size": 1024/' \
    -e '/"mrope_section"/,/]/s/2,/8,/' -e '/"mrope_section"/,/]/s/3/12/' model/config.json
for i in 1 2; do printf '{"id": "%s", "problem": "What is 2+%s?", "solution": "<answer>5</answer>"}\n' $i $i; done > rows.jsonl
printf '| trained | weights and training, MB | peak, MB |\n|---|---|---|\n'
measure() {
    name=$1 dir=$2
    shift 2
    "$program" train --model_name_or_path model --init_weights 1 --train_file rows.jsonl --reward_funcs random \
        --num_generations 2 --gradient_accumulation_steps 1 --max_completion_length 16 --max_steps 2 --allow_text_only \
        --save_strategy no --output_dir "$dir" "$@" > "$dir.out" 2> "$dir.log" || { cat "$dir.log" >&2; exit 1; }
    table=$(grep -m 1 '^total' "$dir.log" | awk '{ printf "%s + %s", $6, $8 }')
    peak=$(tail -n 1 "$dir/metrics.jsonl" | grep -o '"memory/peak_mb":[0-9]*' | cut -d: -f2)
    printf '| %s | %s | %s |\n' "$name" "$table" "$peak"
}
measure 'all weights' full
measure 'adapters, r 16' lora --use_peft --lora_r 16 --lora_alpha 32
measure 'adapters, base in 8 bits' eight --use_peft --lora_r 16 --lora_alpha 32 --load_in_8bit
measure 'adapters, base in 4 bits' four --use_peft --lora_r 16 --lora_alpha 32 --load_in_4bit
