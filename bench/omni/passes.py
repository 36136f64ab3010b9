"""Compares passes over the talking clips with and without a store of decoded media: seconds of reading rows and of the complete pass.

    cargo build --release -p omnigrpo
    cargo run --release -p omnigrpo-demo --example talking_clips -- runs/talking-data
    python3 bench/omni/passes.py --clips runs/talking-data [--binary target/release/omnigrpo] [--threads 2] [--passes 3] [--rows 64]

Runs both recipes of examples/humanomni from random weights, on the first `--rows` clips of each. Reading is the
time that other threads spend on future rows (`data/ahead_time`) and, in the first step, the step's own reading; the complete pass is
the sum of its steps. Losses and rewards of both runs must be equal. Needs only the standard library and ffmpeg.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {"sft": ("sft", 6), "train": ("train", 8)}


def run(args, recipe, rows, num_rows, out, gib):
    verb, batch = RECIPES[recipe]
    command = [
        args.binary, verb, "--config", ROOT / f"examples/humanomni/{recipe}.yaml", "--model_name_or_path", ROOT / "examples/humanomni/model",
        "--init_weights", 1, "--train_file", rows, "--eval_file", args.clips.resolve() / "eval.jsonl", "--output_dir", out,
        "--max_steps", args.passes * num_rows // batch, "--eval_strategy", "no",
        "--logging_steps", 1, "--threads", args.threads, "--skip_data_check", "--mm_processor_cache_gb", gib,
    ]
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in steps if "step_time" in line]
    passes = []
    for first in range(0, len(steps), num_rows // batch):
        own = steps[first : first + num_rows // batch]
        # The first step reads its own rows; the next step reports what it reads ahead.
        reading = sum(line["data/ahead_time"] for line in own) + (own[0]["time/data"] if first == 0 else 0.0)
        passes.append((reading, sum(line["step_time"] for line in own)))
    results = [[line.get("loss"), line.get("reward"), line.get("grad_norm")] for line in steps]
    return passes, results, steps[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clips", type=Path, required=True)
    parser.add_argument("--binary", default=ROOT / "target/release/omnigrpo")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--rows", type=int, default=64)
    args = parser.parse_args()
    for recipe, (_, batch) in RECIPES.items():
        lines = (args.clips.resolve() / f"{recipe}.jsonl").read_text().splitlines(keepends=True)
        lines = lines[: min(len(lines), args.rows) // batch * batch]
        if not lines:
            raise SystemExit(f"{recipe}.jsonl or --rows has fewer rows than a step, expected at least {batch}")
        with tempfile.TemporaryDirectory() as scratch:
            # Next to the clips, which rows name by relative paths.
            rows = args.clips.resolve() / f".passes-{recipe}.jsonl"
            rows.write_text("".join(lines))
            try:
                off, without, _ = run(args, recipe, rows, len(lines), Path(scratch) / "off", 0)
                on, with_store, last = run(args, recipe, rows, len(lines), Path(scratch) / "on", 4)
            finally:
                rows.unlink()
        assert without == with_store, "the two runs differ"
        print(f"\n{recipe}: {len(lines)} clips, {last['memory/media_store_mb']:.0f} MB kept, results equal")
        print(f"{'pass':6}{'reading, s':>12}{'kept, s':>10}{'times':>8}{'all, s':>12}{'kept, s':>10}{'times':>8}")
        for number, ((a, b), (c, d)) in enumerate(zip(off, on), 1):
            print(f"{number:<6}{a:12.2f}{c:10.3f}{a / max(c, 1e-9):8.1f}{b:12.2f}{d:10.2f}{b / d:8.2f}")


if __name__ == "__main__":
    main()
