"""Measures seconds and peak memory of a GRPO step of models of real sizes, by model and method.

    cargo build --release -p omnigrpo
    python3 bench/sizes/run.py --tokenizer DIR [--binary target/release/omnigrpo] [--before OTHER] [--only 3B] [--steps 2]

The configuration is the published one of Qwen2.5-VL with random weights. A step has one image of 448 × 448, G = 8, 64 new tokens, LoRA
of rank 16 on all linear layers of the decoder without dropout (one case has the default 0.05), and KL to the base. `DIR` contains
`tokenizer.json` and `tokenizer_config.json` of a Qwen model. With `--before`, another binary runs the same cases alternately. `--keep`
stores models and rows in a directory, where run_trl.py finds them. Needs only the standard library.
"""

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
from plan_time import picture  # noqa: E402

GOLDEN = ROOT / "crates/models/tests/golden"
BITS = {"bf16": [], "8 bits": ["--load_in_8bit"], "4 bits": ["--load_in_4bit"]}


def checkpoint(directory, size, tokenizer):
    directory.mkdir()
    shutil.copy(GOLDEN / f"published/qwen2_5_vl_{size}/config.json", directory)
    for name in ("chat_template.jinja", "preprocessor_config.json", "generation_config.json"):
        shutil.copy(GOLDEN / "checkpoints/qwen2_5_vl_tied" / name, directory)
    limits = json.loads((directory / "preprocessor_config.json").read_text())
    (directory / "preprocessor_config.json").write_text(json.dumps({**limits, "min_pixels": 3136, "max_pixels": 1003520}))
    (directory / "generation_config.json").write_text("{}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, directory)
    return directory


def run(binary, model, rows, out, steps, words):
    command = [
        binary, "train", "--model_name_or_path", model, "--init_weights", 1, "--torch_dtype", "bfloat16", "--train_file", rows,
        "--output_dir", out, "--reward_funcs", "random", "--num_generations", 8, "--min_completion_length", 64,
        "--max_completion_length", 64, "--gradient_accumulation_steps", 1, "--max_steps", steps, "--save_strategy", "no",
        "--use_peft", "--lora_r", 16, "--lora_alpha", 32, "--beta", 0.04, "--skip_data_check", *words,
    ]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        return None, done.stderr.strip().splitlines()[-1]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "step_time" in line]
    # The first step also fills caches that later steps use.
    seconds = statistics.median(line["step_time"] for line in lines[1:] or lines)
    return seconds, lines[-1]["memory/peak_mb"] / 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--binary", type=Path, default=ROOT / "target/release/omnigrpo")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--only", action="append", help="run only cases whose name contains this")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="directory for models, rows and runs")
    args = parser.parse_args()
    kinds = (("3B", "bf16"), ("3B", "8 bits"), ("3B", "4 bits"), ("7B", "4 bits"))
    cases = [(*kind, recompute, 0) for kind in kinds for recompute in (False, True)]
    cases.insert(2, ("3B", "bf16", False, 0.05))
    before = " before, s | before, GB |" if args.before else ""
    print("| model | base | activations | dropout | seconds a step | peak, GB |" + before)
    print("|---|---|---|---|---|---|" + ("---|---|" if args.before else ""))
    if args.keep:
        args.keep.mkdir(parents=True)
    with contextlib.nullcontext(args.keep) if args.keep else tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        picture(scratch / "picture.png", 448)
        rows = scratch / "rows.jsonl"
        rows.write_text("".join(
            json.dumps({"id": str(i), "image": str(scratch / "picture.png"), "problem": f"What is {i} in this picture?",
                        "solution": "<answer>5</answer>"}) + "\n" for i in range(args.steps)))
        models = {}
        for at, (size, kind, recompute, dropout) in enumerate(cases):
            name = f"{size}, {kind}, {'recomputed' if recompute else 'kept'}, {'dropout' if dropout else 'no dropout'}"
            if args.only and not any(word in name for word in args.only):
                continue
            if size not in models:
                models[size] = checkpoint(scratch / size, size, args.tokenizer)
            words = [*BITS[kind], "--gradient_checkpointing", str(recompute).lower(), "--lora_dropout", dropout]
            line = f"| {size} | {kind} | {'recomputed' if recompute else 'kept'} | {dropout} |"
            for binary in [args.binary] + ([args.before] if args.before else []):
                seconds, peak = run(binary, models[size], rows, scratch / f"run{at}{binary.name}", args.steps, words)
                line += f" {seconds:.1f} | {peak:.1f} |" if seconds else f" | {peak} |"
            print(line, flush=True)


if __name__ == "__main__":
    main()
