"""Trains the demo from three seeds with weights, gradients and moments of few bits, and without; `--all` adds each setting alone.

    python3 bench/learning/few_bits.py target/release/omnigrpo [--seeds 1 2 3] [--all]

Prints the accuracy on the demo's held-out questions after each run. The script fails if the mean with all settings is below the lowest
accuracy without them, or above the highest by more than the spread.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

MASTERS = ["--pure_bf16", "--stochastic_rounding"]
MOMENTS = ["--optim", "adamw_8bit"]
GRADIENTS = ["--grad_dtype", "bfloat16"]
WHOLE, FEW = "bfloat16 with masters", "all three"
WAYS = {
    WHOLE: [], "8-bit moments": MOMENTS, "bfloat16 gradients": GRADIENTS, "random rounding": MASTERS,
    FEW: MOMENTS + GRADIENTS + MASTERS, "rounding to nearest": ["--pure_bf16"],
}


def accuracy(program, folder, seed, words):
    """Returns the accuracy after a run."""
    done = subprocess.run([program, "demo", "--torch_dtype", "bfloat16", "--seed", str(seed), "--output_dir", str(folder), *words],
                          capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval_reward" in row][-1]["eval_accuracy"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for way, words in WAYS.items():
            if not args.all and way not in (WHOLE, FEW):
                continue
            each = [accuracy(args.program, Path(scratch) / f"{len(found)}-{seed}", seed, words) for seed in args.seeds]
            found[way] = each
            print(f"{way:22} {sum(each) / len(each):6.1%}   {'  '.join(f'{one:.1%}' for one in each)}", flush=True)
    whole, few = found[WHOLE], found[FEW]
    mean, least, most = sum(few) / len(few), min(whole), max(whole)
    if not least <= mean <= most + (most - least):
        sys.exit(f"the mean with few bits, {mean:.1%}, is not within {least:.1%} to {most:.1%}")


if __name__ == "__main__":
    main()
