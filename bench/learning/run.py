"""Compares learning curves of TRL and omnigrpo: held-out accuracy by step and by second, as a table and a plot.

    cargo build --release -p omnigrpo
    cargo run --release -p omnigrpo-demo --example task -- runs/task 1 0 8000 480
    python3 bench/learning/run.py --task runs/task --seeds 1 2 3 4 5 --trl_python ~/peer-venv/bin/python

README.md lists the equal settings. Needs matplotlib; the TRL side needs bench/peer/requirements.txt.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

from settings import EVERY, GENERATIONS, HERE, MODEL, PROMPTS, SHARED, STEPS

sys.path.append(str(HERE.parent / "peer"))
from compare import commit, machine  # noqa: E402
from workloads import peak_mb, read_jsonl  # noqa: E402

ROOT = HERE.parents[1]
SYSTEMS = ("trl", "omnigrpo")
COLOURS = {"trl": "#c46a1b", "omnigrpo": "#1b62a5"}


def call(*words):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\nended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def rows_of(data, scratch, kinds=("colour", "count", "position", "shape")):
    """Writes short questions of some kinds of the demo's task: 800 for training, one per prompt of a run, and 192 held out."""
    files = {}
    for split, count in (("train", STEPS * PROMPTS), ("eval", 192)):
        rows = [row for row in read_jsonl(data / f"{split}.jsonl") if row["form"] == "short" and row["type"] in kinds][:count]
        assert len(rows) == count, (split, len(rows))
        for row in rows:
            medium = "image" if "image" in row else "video"
            row[medium] = str(data / row[medium])
        files[split] = scratch / f"{split}.jsonl"
        files[split].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def command(system, args, rows, out, seed):
    if system == "trl":
        return [args.trl_python, HERE / "run_trl.py", rows, out, seed, args.threads]
    settings = dict(
        model_name_or_path=MODEL, train_file=rows, output_dir=out, seed=seed, threads=args.threads, torch_dtype="float32",
        tune_mm_vision="true", per_device_train_batch_size=PROMPTS, gradient_accumulation_steps=1, scale_rewards="group",
        reward_funcs=f"{HERE / 'reward.py'}:right", **SHARED,
    )
    return [args.binary, "train"] + [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]


def completion_tokens(step):
    return round(step["length"] * PROMPTS * GENERATIONS)


def train(system, args, rows, out, seed, cpus):
    """Runs a trainer. Returns seconds until each saved model and until the end, peak memory, and steps."""
    started, clock = time.time(), time.perf_counter()
    with open(out.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(
            [str(word) for word in command(system, args, rows, out, seed)], stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )
        peak = 0.0
        try:
            while process.poll() is None:
                peak = max(peak, peak_mb(process.pid) or 0.0)
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()
    secs = time.perf_counter() - clock
    if process.returncode:
        raise SystemExit(f"{system} ended with {process.returncode}:\n{out.with_suffix('.log').read_text()[-4000:]}")
    saved = {step: (out / f"checkpoint-{step}/model.safetensors").stat().st_mtime - started for step in range(EVERY, STEPS + 1, EVERY)}
    if system == "trl":
        log = json.loads((out / "log.json").read_text())
        steps, versions = log["steps"], log["versions"]
        # TRL counts tokens over the run, including the prompt for each completion.
        prompts = (steps[-1]["tokens"] - sum(completion_tokens(step) for step in steps)) / GENERATIONS
    else:
        lines = [line for line in read_jsonl(out / "metrics.jsonl") if "step_time" in line]
        steps = [dict(reward=line["reward"], kl=line["kl"], length=line["completions/mean_length"], tokens=line["num_tokens"]) for line in lines]
        # Tokens of a step's packed streams: each prompt once, and all tokens of a completion except the last.
        prompts = sum(step["tokens"] + PROMPTS * GENERATIONS - completion_tokens(step) for step in steps)
        versions = dict(omnigrpo=call(args.binary, "--version").strip())
    assert len(steps) == STEPS, (system, len(steps))
    return dict(secs=secs, saved=saved, peak_mb=peak, prompt_tokens=round(prompts), steps=steps, versions=versions)


def accuracy(binary, model, rows, scratch):
    output = scratch / "judged.jsonl"
    call(
        binary, "eval", "--model_name_or_path", model, "--eval_file", rows, "--output", output, "--reward_funcs", "accuracy",
        "--temperature", 0, "--max_completion_length", SHARED["max_completion_length"],
    )
    summary = json.loads(output.with_suffix(".summary.json").read_text())
    assert summary["eval_rows"] == len(read_jsonl(rows)), summary
    output.unlink()
    return summary["eval_rewards/accuracy/mean"]


def plot(path, start, runs):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True)
    for system in SYSTEMS:
        curves = [[100 * value for value in [start, *run["accuracy"].values()]] for run in runs[system]]
        times = [[*run["saved"].values()] for run in runs[system]]
        steps = range(0, STEPS + 1, EVERY)
        for curve, at in zip(curves, times):
            by_step.plot(steps, curve, color=COLOURS[system], alpha=0.3, linewidth=1)
            by_time.plot(at, curve[1:], color=COLOURS[system], alpha=0.3, linewidth=1)
        middle = [mean(values) for values in zip(*curves)]
        by_step.plot(steps, middle, color=COLOURS[system], marker="o", linewidth=2.2, label={"trl": "TRL"}.get(system, system))
        by_time.plot([mean(values) for values in zip(*times)], middle[1:], color=COLOURS[system], marker="o", linewidth=2.2)
    by_step.set(xlabel=f"step ({PROMPTS} prompts × {GENERATIONS} completions)", ylabel="held-out accuracy, %", ylim=(0, 100))
    by_time.set(xlabel="seconds since the start of the process", xscale="log")
    ends = [at for system in SYSTEMS for run in runs[system] for at in run["saved"].values()]
    ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if 0.8 * min(ends) < tick < 1.2 * max(ends)]
    by_time.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    by_time.minorticks_off()
    by_step.legend(frameon=False, loc="lower right")
    for axes in (by_step, by_time):
        axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", type=Path, required=True, help="folder of the demo's task, written by its example")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--binary", type=Path, default=ROOT / "target/release/omnigrpo")
    parser.add_argument("--trl_python", default=sys.executable, help="Python with bench/peer/requirements.txt installed")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for results.json, results.md and curves.png")
    args = parser.parse_args()
    args.binary = args.binary.absolute()
    cpus = sorted(os.sched_getaffinity(0))[: args.threads]
    runs = {system: [] for system in SYSTEMS}
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        rows = rows_of(args.task.resolve(), scratch)
        start = accuracy(args.binary, MODEL, rows["eval"], scratch)
        print(f"start: {100 * start:.1f} %", flush=True)
        for seed in args.seeds:
            for system in SYSTEMS:
                out = scratch / f"{system}-{seed}"
                run = dict(seed=seed, **train(system, args, rows["train"], out, seed, cpus))
                saved = {step: out / f"checkpoint-{step}" for step in range(EVERY, STEPS + 1, EVERY)}
                run["accuracy"] = {step: accuracy(args.binary, model, rows["eval"], scratch) for step, model in saved.items()}
                runs[system].append(run)
                print(f"{system:>8}, seed {seed}: {100 * run['accuracy'][STEPS]:.1f} %, {run['secs']:.1f} s, {run['peak_mb']:.0f} MB", flush=True)
    # Each row occurs once, with the same rendering.
    assert len({run["prompt_tokens"] for of in runs.values() for run in of}) == 1, {s: [r["prompt_tokens"] for r in runs[s]] for s in runs}
    (args.output / "results.json").write_text(json.dumps(
        dict(machine=machine(cpus), commit=commit(), threads=args.threads, settings=SHARED, start=start, runs=runs), indent=1) + "\n")
    plot(args.output / "curves.png", start, runs)
    versions = ", ".join(f"{name} {version}" for name, version in runs["trl"][0]["versions"].items())
    lines = [f"| {system} | " + " | ".join(f"{100 * r['accuracy'][STEPS]:.1f}" for r in of) +
             f" | {100 * mean(r['accuracy'][STEPS] for r in of):.1f} | {mean(r['secs'] for r in of):.1f} | {max(r['peak_mb'] for r in of):.0f} |"
             for system, of in (("TRL", runs["trl"]), ("omnigrpo", runs["omnigrpo"]))]
    seeds = " | ".join(f"seed {seed}" for seed in args.seeds)
    ratio = mean(r["secs"] for r in runs["trl"]) / mean(r["secs"] for r in runs["omnigrpo"])
    (args.output / "results.md").write_text(
        f"# Accuracy after {STEPS} steps of {PROMPTS} × {GENERATIONS}\n\n"
        f"{machine(cpus)['cpu']}, {args.threads} threads; {versions}; {runs['omnigrpo'][0]['versions']['omnigrpo']}. "
        f"Before training {100 * start:.1f} % of 192 held-out questions are answered correctly. After training, in %:\n\n"
        f"| | {seeds} | mean | seconds, whole process | peak, MB |\n|---|" + "---|" * (len(args.seeds) + 3) + "\n" + "\n".join(lines) +
        f"\n\nTRL takes {ratio:.1f} times as long.\n\n![held-out accuracy by step and by second](curves.png)\n"
    )
    print((args.output / "results.md").read_text())


if __name__ == "__main__":
    main()
