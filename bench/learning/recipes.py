#!/usr/bin/env python3
"""Compares recipes of the loss: held-out accuracy by step on two tasks, with the same settings, rows and seeds.

    cargo build --release -p omnigrpo
    cargo run --release -p omnigrpo-demo --example task -- runs/task 1 0 8000 480
    cargo run --release -p omnigrpo-demo --example task -- runs/clips 1 0 8000 1920
    python3 bench/learning/recipes.py demo --task runs/task
    python3 bench/learning/recipes.py clips --task runs/clips
    python3 bench/learning/recipes.py draw                     # needs matplotlib

Each task adds its runs to recipes.json, and runs that are there already are not repeated. `draw` writes recipes.md and recipes.svg.
Distillation learns from the model that seed TEACHER_SEED of `grpo` ends with; rewards train nothing there.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

from run import ROOT, call, rows_of
from settings import EVERY, GENERATIONS, HERE, MODEL, PROMPTS, SHARED, STEPS

sys.path.append(str(HERE.parent / "peer"))
from compare import commit, machine  # noqa: E402
from workloads import read_jsonl  # noqa: E402

sys.path.append(str(ROOT / "tools/book"))
from made import fill  # noqa: E402

PAGE = ROOT / "docs/guide/choosing-settings.md"

RESULTS = HERE / "recipes.json"
TEACHER_SEED = 11
# One recipe each; the KL term is 0 unless named, so that the recipes differ in what they are named for.
VARIANTS = {
    "grpo": {}, "grpo, beta 0.04": dict(beta=0.04), "dr_grpo": dict(loss_type="dr_grpo"), "dapo": dict(loss_type="dapo"),
    "gspo": dict(loss_type="gspo"), "cispo": dict(loss_type="cispo"), "rloo": dict(loss_type="rloo"), "distillation": dict(reward_weights=0),
}
ITERATIONS = (1, 4)


def flags(settings):
    return [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]


# Kinds of questions, and what the page says of the task.
TASKS = {
    "demo": (("colour", "count", "position", "shape"), "questions about drawn pictures"),
    "clips": (("direction",), "questions about the direction in which a shape moves, in clips"),
}


def settings_of(name, data, scratch):
    """8 questions with 8 completions in a step, all weights trained."""
    rows = rows_of(data.resolve(), scratch, TASKS[name][0])
    settings = SHARED | dict(
        model_name_or_path=MODEL, train_file=rows["train"], eval_file=rows["eval"], torch_dtype="float32", tune_mm_vision=True,
        per_device_train_batch_size=PROMPTS, gradient_accumulation_steps=1, beta=0, save_strategy="no", max_steps=STEPS,
        reward_funcs=f"{HERE / 'reward.py'}:right",
    )
    # The recipes have their own clipping.
    for name in ("save_steps", "save_only_model", "epsilon", "loss_type"):
        del settings[name]
    return settings


def train(binary, settings, out, seed, threads, more):
    """Trains once. Returns the held-out accuracy by step, the mean reward of each step, and seconds."""
    settings = settings | dict(
        output_dir=out, seed=seed, threads=threads, eval_on_start=True, eval_strategy="steps", eval_steps=EVERY,
    ) | more
    clock = time.perf_counter()
    call(binary, "train", *flags(settings))
    lines = read_jsonl(out / "metrics.jsonl")
    accuracy = {line["step"]: line["eval_rewards/right/mean"] for line in lines if "eval_rewards/right/mean" in line}
    rewards = [line["rewards/right/mean"] for line in lines if "step_time" in line]
    assert len(accuracy) == settings["max_steps"] // EVERY + 1, sorted(accuracy)
    return dict(accuracy=accuracy, rewards=rewards, secs=round(time.perf_counter() - clock, 1))


def run(name, args):
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    cpus = sorted(os.sched_getaffinity(0))[: args.threads]
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        settings = settings_of(name, args.task, scratch)
        teacher = None
        for seed in args.seeds:
            for iterations in ITERATIONS:
                of = results.setdefault(name, {}).setdefault(str(iterations), {})
                for index, (variant, more) in enumerate(VARIANTS.items()):
                    if str(seed) in of.get(variant, {}):
                        continue
                    if variant == "distillation":
                        if teacher is None:
                            teacher = scratch / "teacher"
                            train(args.binary, settings, teacher, TEACHER_SEED, args.threads, {})
                        more = more | dict(teacher_model_name_or_path=teacher)
                    out = scratch / f"{seed}-{iterations}-{index}"
                    done = train(args.binary, settings, out, seed, args.threads, dict(num_iterations=iterations) | more)
                    of.setdefault(variant, {})[str(seed)] = done | dict(commit=commit(), machine=machine(cpus)["cpu"])
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
                    print(f"{name}, {iterations} per rollout, {variant}, seed {seed}: {100 * last(done):.1f} %, {done['secs']} s", flush=True)


def last(run):
    return [*run["accuracy"].values()][-1]


def reached(run, share=0.75):
    """The step at which a straight line between two evaluations reaches the share; None if none does."""
    points = [(int(step), value) for step, value in run["accuracy"].items()]
    for (before, low), (step, high) in zip(points, points[1:]):
        if high >= share:
            return before + (step - before) * (share - low) / (high - low)
    return None


def area(run):
    """Mean accuracy over the run, which rewards learning early."""
    return mean([*run["accuracy"].values()][1:])


def panels(results):
    return [(name, iterations) for name in TASKS for iterations in ITERATIONS if str(iterations) in results.get(name, {})]


def title(iterations):
    return f"{iterations} update{'s' if iterations > 1 else ''} per rollout"


def ends(runs):
    """The accuracies of the seeds in %: mean, lowest and highest."""
    ends = [100 * last(run) for run in runs]
    return f"{mean(ends):.1f} ({min(ends):.1f} to {max(ends):.1f})"


def page(results):
    """The text of recipes.md."""
    lines = [
        "# Recipes of the loss, compared", "",
        "Written by [recipes.py](recipes.py) from [recipes.json](recipes.json), which names commit and machine of every run. Greedy accuracy on held-out",
        "questions in %: the mean of the seeds, with the lowest and the highest of them. *On the way* is the mean of all evaluations after the start,",
        "which is higher if a recipe learns earlier. *75 % at step* is the mean step at which the line between two evaluations crosses it. `beta`",
        "is 0 unless named. With one update per rollout, nothing is clipped: recipes then differ in",
        "how they weigh tokens and groups alone. Most differences lie within the range of the seeds. The teacher of *distillation* was trained by",
        "reward on the same rows, which is not counted.", "",
        "![held-out accuracy by step](recipes.svg)",
    ]
    for name, iterations in panels(results):
        of = results[name][str(iterations)]
        text = f"{TASKS[name][1]}, the demo's checkpoint, {PROMPTS} × {GENERATIONS}, all weights"
        start = 100 * [*next(iter(of["grpo"].values()))["accuracy"].values()][0]
        lines += ["", f"## {name}: {title(iterations)}", "", f"{text[0].upper()}{text[1:]}; {start:.1f} % before training.", "",
                  "| recipe | seeds | at the end | on the way | 75 % at step |", "|---|---|---|---|---|"]
        for variant in VARIANTS:
            runs = [*of.get(variant, {}).values()]
            if runs:
                steps = [step for step in map(reached, runs) if step is not None]
                when = f"{mean(steps):.0f}" + ("" if len(steps) == len(runs) else f" ({len(steps)} of {len(runs)} seeds)") if steps else "never"
                lines.append(f"| {variant} | {len(runs)} | {ends(runs)} | {100 * mean(map(area, runs)):.1f} | {when} |")
    return "\n".join(lines) + "\n"


def table(results):
    """The table of the guide: a column for each task and number of updates."""
    columns = panels(results)
    lines = [
        "| recipe | " + " | ".join(f"{name}, {title(iterations)}" for name, iterations in columns) + " |", "|---" * (len(columns) + 1) + "|",
    ]
    for variant in VARIANTS:
        cells = [[*results[name][str(iterations)].get(variant, {}).values()] for name, iterations in columns]
        lines.append(f"| {variant} | " + " | ".join(ends(runs) if runs else "" for runs in cells) + " |")
    return {"recipes: bench/learning/recipes.py": "\n".join(lines)}


def draw(_name, _args):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = json.loads(RESULTS.read_text())
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "recipes"})
    figure, axes = plt.subplots(1, len(panels(results)), figsize=(4.6 * len(panels(results)), 4.2), sharey=True)
    for axis, (name, iterations) in zip(axes, panels(results)):
        of = results[name][str(iterations)]
        for colour, variant in enumerate(VARIANTS):
            curves = [run["accuracy"] for run in of.get(variant, {}).values()]
            if curves:
                steps = [int(step) for step in curves[0]]
                axis.plot(
                    steps, [100 * mean(values) for values in zip(*(curve.values() for curve in curves))], label=variant, color=f"C{colour}",
                    linestyle="--" if variant in ("distillation", "grpo, beta 0.04") else "-", linewidth=1.6,
                )
        axis.set(xlabel="step", title=f"{name}, {title(iterations)}", ylim=(0, 100))
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("held-out accuracy, %")
    axes[-1].legend(frameon=False, loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(HERE / "recipes.svg", metadata={"Date": None})
    (HERE / "recipes.md").write_text(page(results))
    fill(PAGE, table(results), check=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=[*TASKS, "draw"])
    parser.add_argument("--check", action="store_true", help="only compare the pages with recipes.json")
    parser.add_argument("--task", type=Path, help="folder of rows and media, written by the example `task`")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--binary", type=Path, default=ROOT / "target/release/omnigrpo")
    args = parser.parse_args()
    if args.check:
        results = json.loads(RESULTS.read_text())
        stale = (HERE / "recipes.md").read_text() != page(results)
        if stale:
            print("bench/learning/recipes.md is not what recipes.json gives: run recipes.py draw", file=sys.stderr)
        return fill(PAGE, table(results), check=True) or stale
    if args.what is None:
        parser.error("name a task, or draw")
    if args.what in TASKS and args.task is None:
        parser.error(f"{args.what} needs --task")
    args.binary = args.binary.absolute()
    os.chdir(ROOT)
    return (draw if args.what == "draw" else run)(args.what, args)


if __name__ == "__main__":
    sys.exit(main())
