"""Trains from several seeds, evaluates each, and draws the rewards; TRL runs the same rows and settings if it is asked to.

    python3 examples/smollm2/seeds.py target/release/omnigrpo runs/smollm2 --seeds 1 2 3 --trl PYTHON

The folder is that of `fetch.py`, with the converted model in `model`. PYTHON is an interpreter with torch, transformers, trl and peft. The
folder gets `seed-N.json` for each seed, which a second call does not train again, `results.json` and `curves.svg`. The script fails if the mean of the seeds is below the limit or a run takes too long; `--slow`
allows any time, for machines with other work.
"""

import argparse
import json
import math
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Accuracy on held-out questions in the mean of the seeds, and seconds of a run with its evaluations on two Zen 4 cores.
LEAST_ACCURACY, MOST_SECS = 0.76, 300
TRL_SECS = 3600


def interval(share, n):
    """Wilson's interval of 95 %."""
    z = 1.96
    middle, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return [(middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(*args):
    """Runs a program. Returns its seconds, and the largest memory of any program so far in GB."""
    start = time.time()
    done = subprocess.run([*map(str, args)], cwd=HERE.parents[1])
    if done.returncode:
        sys.exit(f"{' '.join(map(str, args))} ended with {done.returncode}")
    return time.time() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6


def accuracy_of(metrics):
    return metrics["eval_rewards/exact/mean"]


def train(program, folder, seed, steps):
    """Trains from a seed, with evaluations before and after on the held-out questions. A result of an earlier call is taken as it is."""
    out, result = folder / f"seed-{seed}", folder / f"seed-{seed}.json"
    if result.exists():
        return json.loads(result.read_text())
    shutil.rmtree(out, ignore_errors=True)
    secs, gigabytes = run(
        program, "train", "--config", HERE / "train.yaml", "--model_name_or_path", folder / "model", "--train_file", folder / "train.jsonl",
        "--eval_file", folder / "held_out.jsonl", "--output_dir", out, "--seed", seed, "--max_steps", steps,
    )
    metrics = rows(out / "metrics.jsonl")
    evaluations = [accuracy_of(row) for row in metrics if "eval_reward" in row]
    rewards = [row["reward"] for row in metrics if "step_time" in row]
    done = dict(seed=seed, before=evaluations[0], after=evaluations[-1], secs=secs, gigabytes=gigabytes, rewards=rewards)
    result.write_text(json.dumps(done) + "\n")
    return done


def evaluate(program, folder, name, adapter):
    """Returns the accuracy on another set, of the model or of a trained adapter."""
    out = folder / f"{name}-answers.jsonl"
    args = ["--adapter_name_or_path", adapter] if adapter else []
    run(program, "eval", "--model_name_or_path", folder / "model", *args, "--eval_file", folder / f"{name}.jsonl", "--output", out,
        "--reward_funcs", HERE / "reward.py:exact", "--torch_dtype", "bfloat16", "--max_completion_length", 16, "--temperature", 0)
    scores = [score for row in rows(out) if "rewards" in row for score in row["rewards"]["exact"]]
    return sum(scores) / len(scores)


def svg(curves):
    """Returns a chart of rewards by step: `curves` are (label, colour, numbers)."""
    width, height, left, bottom = 640, 280, 44, 32
    steps = max(len(numbers) for _, _, numbers in curves)
    def at(step, value):
        return f"{left + (width - left - 12) * step / max(steps - 1, 1):.1f},{12 + (height - bottom - 12) * (1 - value):.1f}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
             f'<rect width="{width}" height="{height}" fill="#fff"/>']
    for tick in range(0, 11, 2):
        (x, y), end = at(0, tick / 10).split(","), at(steps - 1, 0).split(",")[0]
        parts.append(f'<path d="M{x},{y}H{end}" stroke="#ddd"/><text x="8" y="{float(y) + 4:.1f}">{tick * 10} %</text>')
    for step in range(0, steps, 10):
        parts.append(f'<text x="{at(step, 0).split(",")[0]}" y="{height - 12}">{step or "step 0"}</text>')
    for place, (label, colour, numbers) in enumerate(curves):
        # The mean of five steps.
        means = [sum(numbers[max(i - 4, 0) : i + 1]) / len(numbers[max(i - 4, 0) : i + 1]) for i in range(len(numbers))]
        points = " ".join(at(step, min(max(value, 0), 1)) for step, value in enumerate(means))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{width - 250}" y="{height / 2 + 16 * place:.0f}" fill="{colour}">{label}</text>')
    return "\n".join(parts + ["</svg>", ""])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--trl")
    parser.add_argument("--slow", action="store_true")
    args = parser.parse_args()
    program, folder = args.program.resolve(), args.folder.resolve()
    held_out = len(rows(folder / "held_out.jsonl"))

    runs = [train(program, folder, seed, args.steps) for seed in args.seeds]
    after = sum(run["after"] for run in runs) / len(runs)
    results = dict(questions=held_out, mean_after=after, runs=[
        dict(run, before_interval=interval(run["before"], held_out), after_interval=interval(run["after"], held_out)) for run in runs
    ])
    first = folder / f"seed-{args.seeds[0]}"
    results["harder"] = {
        name: dict(before=evaluate(program, folder, name, None), after=evaluate(program, folder, name, first)) for name in ("large", "two")
    }
    curves = [(f"omnigrpo, seed {run['seed']}", colour, run["rewards"]) for run, colour in zip(runs, ["#1f6f43", "#4a9b6e", "#8fc7a9"] * 3)]
    for dtype, colour in (("bfloat16", "#b5651d"), ("float32", "#7a4e9c")) if args.trl else ():
        out = folder / f"trl-{dtype}.json"
        run(args.trl, HERE / "trl_peer.py", folder, dtype, out, args.seeds[0], args.steps, TRL_SECS)
        results[f"trl_{dtype}"] = peer = json.loads(out.read_text())
        curves.append((f"TRL, {dtype}", colour, peer["rewards"]))
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "curves.svg").write_text(svg(curves))
    for one in results["runs"]:
        print("seed {seed}: {0:.1%} to {1:.1%} ({2:.1%} to {3:.1%}) on held-out questions, {secs:.0f} s, {gigabytes:.2f} GB".format(
            one["before"], one["after"], *one["after_interval"], **one))
    print("mean {:.1%}; ".format(after) + ", ".join("{}: {before:.1%} to {after:.1%}".format(n, **h) for n, h in results["harder"].items()))
    slow = [one["seed"] for one in runs if one["secs"] > MOST_SECS and not args.slow]
    if after < LEAST_ACCURACY or slow:
        sys.exit(f"expected at least {LEAST_ACCURACY:.0%} in the mean, and at most {MOST_SECS} s per seed; too slow: {slow}")


if __name__ == "__main__":
    main()
