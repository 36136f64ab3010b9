#!/usr/bin/env python3
"""Trains the demo's checkpoint with one setting changed at a time: `run.py PROGRAM [--seeds 1 2 3] [--minutes N]`, or `run.py --check`.

Two tasks: naming the colour of one shape, and saying where it is. Each run takes 40 steps of 64 answers, and an evaluation of 96 held-out
questions before and after. A value of `num_generations` keeps the 64 answers of a step. Length and pixels decide cost, so their tables have it:
tokens that a step trains on, and seconds of processor time that the whole run takes, which other programs on the machine change little. Every
run becomes an entry of results.json with its commit and machine; a run that is there already is not made again. With `--minutes`, the script
starts no run after that time.
The tables of docs/guide/choosing-settings.md show the means over the seeds that are complete; `--check` compares them with the file.
"""

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/book"))
from made import fill, machine  # noqa: E402

PAGE = ROOT / "docs/guide/choosing-settings.md"
RECORD = Path(__file__).resolve().parent / "results.json"
TASKS = {"colour": "colour", "position": "position"}
STEPS = 40
BASE = {"learning_rate": 3e-4, "beta": 0.01, "num_generations": 8}
ANSWERS = 64
ADAPTERS = {"use_peft": True, "learning_rate": 3e-3}
# Heading of the table, and its rows: what the reader sees, and the settings that differ.
SWEEPS = {
    "rate": ("learning rate", {"1e-5": {"learning_rate": 1e-5}, "1e-4": {"learning_rate": 1e-4}, "3e-4": {}, "1e-3": {"learning_rate": 1e-3},
                               "3e-3": {"learning_rate": 3e-3}}),
    "group": ("G, with as many questions as make 64 answers", {"2": {"num_generations": 2}, "4": {"num_generations": 4}, "8": {},
                                                               "16": {"num_generations": 16}}),
    "beta": ("beta", {"0": {"beta": 0.0}, "0.01": {}, "0.1": {"beta": 0.1}, "1": {"beta": 1.0}}),
    "rank": ("LoRA rank, at a learning rate of 3e-3", {"2": {**ADAPTERS, "lora_r": 2, "lora_alpha": 4}, "8": {**ADAPTERS, "lora_r": 8, "lora_alpha": 16},
                                                      "32": {**ADAPTERS, "lora_r": 32, "lora_alpha": 64}}),
    "length": ("`--max_completion_length`", {f"{tokens}": {"max_completion_length": tokens} for tokens in (5, 8, 12, 48)}),
    # The demo's pictures have 56 or 84 pixels a side. The equal minimum enlarges them, as if they were photos.
    "pixels": ("`--max_pixels`", {f"{pixels:,}": {"min_pixels": pixels, "max_pixels": pixels} for pixels in (784, 3136, 12544, 50176)}),
}
# Sweeps whose tables show the cost.
COST = {"length", "pixels"}


def key(task, own, seed):
    return f"{task} seed={seed} " + " ".join(f"{name}={value}" for name, value in sorted({**BASE, **own}.items()))


def settings(task, own, seed):
    given = {**BASE, **own}
    return {
        "model_name_or_path": "demo/start-model", "train_file": f"{task}.jsonl", "eval_file": f"{task}_eval.jsonl", "reward_funcs": "accuracy format",
        "reward_weights": "1 0.1", "max_completion_length": 12, **given, **({} if "use_peft" in given else {"tune_mm_vision": True}),
        "per_device_train_batch_size": ANSWERS // given["num_generations"], "gradient_accumulation_steps": 1, "max_steps": STEPS,
        "eval_on_start": True, "eval_steps": STEPS, "save_strategy": "no", "seed": seed, "threads": 1,
    }


def train(program, folder, given):
    shutil.rmtree(folder / "run", ignore_errors=True)
    words = [word for name, value in given.items() for word in (f"--{name}", *(str(value).lower() if isinstance(value, bool) else str(value)).split())]
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([program, "train", *words, "--output_dir", "run"], cwd=folder, capture_output=True, text=True)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{words}:\n{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    tests = [line for line in lines if "eval_accuracy" in line]
    steps = [line for line in lines if "frac_reward_zero_std" in line]
    return {"before": tests[0]["eval_accuracy"], "after": tests[-1]["eval_accuracy"], "rows": tests[-1]["eval_rows"], "kl": steps[-1].get("kl"),
            "last_reward": statistics.fmean(line["reward"] for line in steps[-5:]),
            "zero_variance": statistics.fmean(line["frac_reward_zero_std"] for line in steps),
            "cut_off": statistics.fmean(line["completions/clipped_ratio"] for line in steps),
            "tokens": statistics.fmean(line["num_tokens"] for line in steps),
            "cpu_secs": round(end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime, 2)}


def short(kl):
    return f"{kl:.2g}" if kl >= 0.001 else "< 0.001"


def right(made):
    after = [100 * one["after"] for one in made]
    return f"{statistics.fmean(after):.0f} % ({min(after):.0f} to {max(after):.0f})"


def tables(record):
    runs = record["runs"]
    seeds = [seed for seed in record["seeds"] if all(key(task, own, seed) in runs for task in TASKS for _, rows in SWEEPS.values() for own in rows.values())]
    parts = {}
    for name, (heading, rows) in SWEEPS.items():
        columns = [f"{task}: right" for task in TASKS] if name in COST else [f"{task}: right | KL | alike" for task in TASKS]
        columns += ["cut off", "tokens a step", "processor time"] if name in COST else []
        lines = [" | ".join(["", heading, *columns, ""]).strip()]
        lines += ["|---" * (lines[0].count("|") - 1) + "|"]
        for shown, own in rows.items():
            made = {task: [runs[key(task, own, seed)] for seed in seeds] for task in TASKS}
            cells = []
            for some in made.values():
                cells.append(right(some))
                if name not in COST:
                    # Without a reference, KL is not measured.
                    cells.append("" if some[0]["kl"] is None else short(statistics.fmean(one["kl"] for one in some)))
                    cells.append(f"{100 * statistics.fmean(one['zero_variance'] for one in some):.0f} %")
            if name in COST:
                cut, tokens, secs = (statistics.fmean(one[of] for some in made.values() for one in some) for of in ("cut_off", "tokens", "cpu_secs"))
                cells += [f"{100 * cut:.0f} %", f"{tokens:,.0f}", f"{secs:.1f} s"]
            lines.append(f"| {shown} | " + " | ".join(cells) + " |")
        parts[f"{name}: bench/sweeps/run.py"] = "\n".join(lines)
    before = [100 * statistics.fmean(runs[key(task, {}, seed)]["before"] for seed in seeds) for task in TASKS]
    parts["sweep: bench/sweeps/run.py"] = (
        f"Before training, {before[0]:.0f} % (colour) and {before[1]:.0f} % (position) of the held-out answers are right. Seeds: "
        f"{', '.join(map(str, seeds))}. Machines: {' and '.join(sorted({one['machine'] for one in runs.values()}))}, one thread a run.")
    return parts


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("program", nargs="?")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments.add_argument("--minutes", type=float, default=1e9)
    arguments.add_argument("--check", action="store_true")
    arguments = arguments.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"runs": {}}
    if arguments.check:
        return fill(PAGE, tables(record), check=True)
    program = str(Path(arguments.program).resolve())
    made_by = machine("python3 bench/sweeps/run.py PROGRAM")
    record = {"command": made_by.pop("command"), "seeds": arguments.seeds, "runs": record["runs"]}
    end = time.monotonic() + 60 * arguments.minutes
    scratch = Path(tempfile.mkdtemp())
    try:
        subprocess.run([program, "demo", "--max_steps", "1", "--output_dir", scratch / "demo"], capture_output=True, check=True)
        for task, kind in TASKS.items():
            for source, name in (("train", task), ("eval", f"{task}_eval")):
                rows = [json.loads(line) for line in (scratch / f"demo/data/{source}.jsonl").read_text().splitlines()]
                rows = [{**row, "image": f"demo/data/{row['image']}"} for row in rows if row["type"] == kind]
                if source == "train":
                    rows = [row for row in rows if row["form"] == "short"]
                (scratch / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for seed in arguments.seeds:
            for _, rows in SWEEPS.values():
                for own in rows.values():
                    for task in TASKS:
                        if key(task, own, seed) in record["runs"] or time.monotonic() > end:
                            continue
                        start = time.monotonic()
                        made = train(program, scratch, settings(task, own, seed))
                        record["runs"][key(task, own, seed)] = {**made, **made_by}
                        RECORD.write_text(json.dumps(record, indent=1) + "\n")
                        print(key(task, own, seed), f"{made['before']:.2f} → {made['after']:.2f}, {time.monotonic() - start:.0f} s", flush=True)
    finally:
        shutil.rmtree(scratch)
    return fill(PAGE, tables(record), check=False) if PAGE.exists() else 0


if __name__ == "__main__":
    sys.exit(main())
