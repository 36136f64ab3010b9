"""Trains a small Qwen3.5 on the demo's task from random weights, and checks what it learns.

    cargo build --release -p omnigrpo
    cargo run --release -p omnigrpo-demo --example task -- runs/task
    python3 bench/learning/qwen3_5.py --task runs/task --place runs/qwen3_5

The recipes are those of the embedded model (examples/demo), and so are the tokenizer and the sizes of the pictures. Supervised steps show
what pictures contain, and GRPO teaches to say it. A run that was interrupted resumes. Writes qwen3_5.md.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from run import ROOT, accuracy, call
from settings import HERE
from small_qwen3_5 import write_checkpoint

sys.path.append(str(HERE.parent / "peer"))
from compare import commit, machine  # noqa: E402

RECIPES = ROOT / "examples/demo"
LEAST, MOST_EXCHANGED = 0.9, 0.4


def train(binary, verb, recipe, place, threads, **settings):
    """Runs a recipe, or resumes it. Returns its seconds, which are counted over all pieces."""
    out, clock = place / verb, place / f"{verb}.secs"
    before = float(clock.read_text()) if clock.exists() else 0.0
    if (out / "model.safetensors").exists():
        return before
    words = [binary, verb, "--config", RECIPES / recipe, "--output_dir", out, "--threads", threads, "--save_strategy", "steps",
             "--save_steps", 100, "--save_total_limit", 1]
    for key, value in settings.items():
        words += [f"--{key}", value]
    started = time.perf_counter()
    try:
        subprocess.run([str(word) for word in words], check=True)
    finally:
        clock.write_text(f"{before + time.perf_counter() - started:.1f}")
    return float(clock.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", type=Path, required=True, help="folder of the demo's task, written by its example")
    parser.add_argument("--place", type=Path, required=True, help="folder for the model and its runs")
    parser.add_argument("--sft_steps", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--binary", type=Path, default=ROOT / "target/release/omnigrpo")
    args = parser.parse_args()
    binary, task, place = args.binary.absolute(), args.task.resolve(), args.place.resolve()
    place.mkdir(parents=True, exist_ok=True)
    start = place / "start"
    if not start.exists():
        write_checkpoint(start)
    each = dict(seed=args.seed, eval_file=task / "eval.jsonl")
    secs = [
        train(binary, "sft", "sft.yaml", place, args.threads, model_name_or_path=start, init_weights=args.seed,
              train_file=task / "sft.jsonl", max_steps=args.sft_steps, **each),
        train(binary, "train", "train.yaml", place, args.threads, model_name_or_path=place / "sft", train_file=task / "train.jsonl",
              max_steps=args.steps, **each),
    ]
    scores = [accuracy(binary, place / model, task / f"{rows}.jsonl", place)
              for model, rows in (("sft", "eval"), ("train", "eval"), ("train", "eval_permuted"))]
    before, after, exchanged = (f"{100 * score:.1f} %" for score in scores)
    cpus = sorted(os.sched_getaffinity(0))[: args.threads]
    version = call(binary, "--version").strip()
    (HERE / "qwen3_5.md").write_text(
        "# A small Qwen3.5 learns the demo's task\n\n"
        "Four blocks, the last of which attends, and a tower of four blocks: 1.25 million parameters with random weights. Command:\n\n"
        f"```sh\npython3 bench/learning/qwen3_5.py --task runs/task --place runs/qwen3_5 --sft_steps {args.sft_steps} --steps {args.steps}"
        f" --seed {args.seed}\n```\n\n"
        f"{machine(cpus)['cpu']}, {args.threads} threads; {version}, commit {commit()}. Accuracy on 480 held-out questions:\n\n"
        "| | accuracy | seconds |\n|---|---|---|\n"
        f"| after {args.sft_steps} supervised steps | {before} | {secs[0]:.0f} |\n"
        f"| after {args.steps} steps of GRPO | {after} | {secs[1]:.0f} |\n"
        f"| the same, with exchanged pictures and clips | {exchanged} | |\n"
    )
    print((HERE / "qwen3_5.md").read_text())
    if scores[1] < LEAST or scores[2] >= MOST_EXCHANGED:
        sys.exit(f"expected at least {LEAST:.0%}, and less than {MOST_EXCHANGED:.0%} with exchanged pictures")


if __name__ == "__main__":
    main()
