"""Runs `omnigrpo train` once on a workload and writes the same JSON as run_trl.py. Needs only the standard library.

    cargo build --release -p omnigrpo
    python run_omnigrpo.py --workload image1 --steps 3 --output result.json
"""

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

from workloads import (
    BETA, HERE, LEARNING_RATE, LORA_RANK, MAX_GRAD_NORM, NUM_GENERATIONS, SEED, TEMPERATURE, WORKLOADS, directory,
    model_of, peak_mb, read_jsonl,
)

BINARY = HERE.parents[1] / "target/release/omnigrpo"
WATCH_SECS = 0.05


def command(args, root, output_dir):
    workload = WORKLOADS[args.workload]
    completion = workload.completion_tokens
    settings = dict(
        model_name_or_path=model_of(args.workload), train_file=root / "train.jsonl", output_dir=output_dir,
        torch_dtype=args.torch_dtype,
        reward_funcs="random", num_generations=NUM_GENERATIONS, min_completion_length=completion,
        max_completion_length=completion, temperature=TEMPERATURE, loss_type="grpo", beta=BETA,
        per_device_train_batch_size=1, gradient_accumulation_steps=1,
        learning_rate=LEARNING_RATE, lr_scheduler_type="linear", weight_decay=0, max_grad_norm=MAX_GRAD_NORM,
        max_steps=args.steps, save_strategy="no", seed=SEED, threads=args.threads,
    )
    if workload.num_images:
        settings["image_folders"] = root
    elif workload.sees:
        settings["allow_text_only"] = "true"
    if workload.recomputes:
        settings["gradient_checkpointing"] = "true"
    if args.use_peft:
        settings |= dict(use_peft="true", lora_r=LORA_RANK, lora_alpha=2 * LORA_RANK)
    elif workload.sees:
        settings["tune_mm_vision"] = "true"
    return [str(args.binary), "train"] + [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def watch(process, metrics_file):
    """Watches the process until it ends. Returns its peak memory, and the time at which each line of metrics appeared."""
    peak, seen_at = 0.0, []
    while process.poll() is None:
        peak = max(peak, peak_mb(process.pid) or 0.0)
        lines = metrics_file.read_bytes().count(b"\n") if metrics_file.is_file() else 0
        seen_at += [time.perf_counter()] * (lines - len(seen_at))
        time.sleep(WATCH_SECS)
    return peak, seen_at


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--torch_dtype", default="float32")
    parser.add_argument("--use_peft", action="store_true")
    parser.add_argument("--binary", type=Path, default=BINARY)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    root, workload = directory(args.workload), WORKLOADS[args.workload]
    if not args.binary.is_file():
        raise SystemExit(f"{args.binary} does not exist; run cargo build --release -p omnigrpo, or give --binary")
    version = subprocess.run([args.binary, "--version"], capture_output=True, text=True, check=True).stdout.strip()

    with tempfile.TemporaryDirectory() as scratch:
        run_dir, log_file = Path(scratch) / "run", Path(scratch) / "log"
        with open(log_file, "w") as log:
            process = subprocess.Popen(
                command(args, root, run_dir),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )
            try:
                peak, seen_at = watch(process, run_dir / "metrics.jsonl")
            finally:
                process.kill()
                process.wait()
        if process.returncode != 0:
            raise SystemExit(f"omnigrpo ended with {process.returncode}:\n{log_file.read_text()[-4000:]}")
        rows = [row for row in read_jsonl(run_dir / "metrics.jsonl") if "step_time" in row]

    assert len(rows) == args.steps, f"{len(rows)} steps in metrics.jsonl, expected {args.steps}"
    steps = []
    for row in rows:
        assert row["completions/mean_length"] == workload.completion_tokens, row
        # Packed stream: the prompt once, and all tokens of a completion except the last.
        expected = workload.prompt_tokens + NUM_GENERATIONS * (workload.completion_tokens - 1)
        assert row["num_tokens"] == expected, f"num_tokens {row['num_tokens']}, expected {expected}: another prompt?"
        phases = {key.removeprefix("time/"): value for key, value in row.items() if key.startswith("time/")}
        phases["other"] = row["step_time"] - sum(phases.values())
        steps.append({"step_time": row["step_time"], "phases": phases})
    # The reported step times must equal the time that passes outside, up to the watcher's resolution.
    if len(seen_at) == len(steps) > 1:
        outside, inside = seen_at[-1] - seen_at[0], sum(step["step_time"] for step in steps[1:])
        assert outside <= 1.05 * inside + 4 * WATCH_SECS, f"{outside:.2f} s passed, the steps report {inside:.2f} s"
    result = dict(
        system="omnigrpo", workload=args.workload, threads=args.threads, steps=steps,
        peak_mb=max(peak, rows[-1].get("memory/peak_mb", 0.0)), versions=dict(omnigrpo=version),
        prompt_tokens=workload.prompt_tokens, num_tokens=[row["num_tokens"] for row in rows],
        grad_norm=[row["grad_norm"] for row in rows], kl=[row["kl"] for row in rows],
    )
    with open(args.output, "w") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
