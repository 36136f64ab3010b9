#!/usr/bin/env python3
"""Makes a run for each illness of the verdict, from the demo's checkpoint: `illnesses.py PROGRAM [NAME…]`, or `illnesses.py --check`.

Each run becomes an entry of docs/guide/illnesses.json, with its settings, what `omnigrpo diagnose` says about it, the commit, the
machine and the command, and a chart in docs/guide/images, which `omnigrpo report` draws. The script fails if a run has another illness
than its name says. The page docs/guide/it-does-not-learn.md shows the settings, the verdicts and the messages between its marks;
`--check` compares them with the file and needs no program.

All runs train on the same 320 questions about the colour of one shape. Fourteen runs take about five minutes on two cores.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from made import ROOT, fill, machine

PAGE = ROOT / "docs/guide/it-does-not-learn.md"
RECORD = ROOT / "docs/guide/illnesses.json"
IMAGES = ROOT / "docs/guide/images"

# Rewards of these runs.
REWARDS = '''\
import random
import re

def said(completion):
    return (re.findall(r"<answer>(.*?)</answer>", completion[0]["content"]) or [""])[0].strip()

def right(completions, colour, **columns):
    return [float(said(one) == wanted) for one, wanted in zip(completions, colour)]
right.range = (0, 1)

def contains(completions, colour, **columns):
    return [float(wanted in one[0]["content"]) for one, wanted in zip(completions, colour)]
contains.range = (0, 1)

def capital(completions, colour, **columns):
    return [float(said(one) == wanted.capitalize()) for one, wanted in zip(completions, colour)]
capital.range = (0, 1)

def reason(completions, **columns):
    return [float("because" in one[0]["content"]) for one in completions]
reason.range = (0, 1)

def consolation(completions, colour, **columns):
    return [0.5 * (said(one) == "red") + 0.5 * (said(one) == wanted) for one, wanted in zip(completions, colour)]
consolation.range = (0, 1)

dice = random.Random(1)

def judge(completions, **columns):
    return [0.5 * (said(one) == "red") + 0.5 * dice.random() for one in completions]
judge.range = (0, 1)

def marks(completions, **columns):
    return [dice.random() for one in completions]
marks.range = (0, 1)

def warm(completions, **columns):
    return [float(said(one) in ("red", "orange", "yellow", "pink", "brown")) for one in completions]
warm.range = (0, 1)
'''

COMMON = {
    "model_name_or_path": "model", "train_file": "rows.jsonl", "reward_funcs": "rewards.py:right", "learning_rate": 3e-4, "beta": 0.01,
    "tune_mm_vision": True, "max_completion_length": 12, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "num_generations": 8, "max_steps": 60, "seed": 1, "save_strategy": "no", "threads": 1,
}

# Name of the rule, or `none`; the chart of the page; settings that differ from those above.
RUNS = {
    "healthy": ("none", "reward", {}),
    "dead_reward": ("dead_reward", "reward", {"reward_funcs": "rewards.py:capital", "max_steps": 20}),
    "ran_away": ("ran_away", "reward", {"learning_rate": 1e-2, "beta": 0, "warmup_steps": 30}),
    "cut_off": ("cut_off", "cut-off", {"reward_funcs": "rewards.py:contains", "max_completion_length": 4, "learning_rate": 1e-6, "max_steps": 20}),
    "solved": ("solved", "groups-without-variance", {"max_steps": 100}),
    "hopeless": ("hopeless", "groups-without-variance", {"train_file": "foreign.jsonl", "max_steps": 40}),
    "reward_never_fires": ("reward_never_fires", "reward-reason", {"reward_funcs": "rewards.py:right rewards.py:reason", "max_steps": 30}),
    "entropy_collapsed": ("entropy_collapsed", "entropy", {"train_file": "shuffled.jsonl", "reward_funcs": "rewards.py:consolation", "beta": 0, "max_steps": 120}),
    "no_variance": ("no_variance", "groups-without-variance", {"train_file": "easy_or_hard.jsonl", "learning_rate": 1e-6}),
    "hacked": ("hacked", "evaluation", {
        "train_file": "both.jsonl", "reward_funcs": "accuracy rewards.py:judge", "reward_weights": "0 1", "val_split_ratio": 0.3,
        "eval_on_start": True, "eval_steps": 10}),
    "format_only": ("format_only", "reward-marks", {"reward_funcs": "rewards.py:marks rewards.py:warm", "max_steps": 220}),
    "flat": ("flat", "kl", {"learning_rate": 1e-6}),
    "flat_reward": ("flat_reward", "kl", {"train_file": "shuffled.jsonl", "max_steps": 240}),
    "large_gap": ("large_gap", "rollout-and-training", {
        "use_peft": True, "tune_mm_vision": False, "lora_r": 32, "lora_alpha": 64, "lora_dropout": 0.8, "learning_rate": 3e-3, "max_steps": 40}),
}


def rows(data):
    """Writes the files of rows, with the media of the demo."""
    own = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    colours = [row for row in own if row["type"] == "colour"]
    def row(old, **new):
        return {"image": str(data / old["image"]), "problem": re.sub(r"^<image>\n", "", old["conversations"][0]["value"]),
                "solution": old["solution"], "colour": old["answer"], **new}
    short = [row(old) for old in colours if old["form"] == "short"][:320]
    choices = [row(old) for old in colours if old["form"] == "choice"][:320]
    mixed = [own["colour"] for own in short]
    random.Random(1).shuffle(mixed)
    # The model never says this word, so these rows earn nothing.
    foreign = [{**own, "colour": own["colour"] if at < 8 else "rot"} for at, own in enumerate(short)]
    files = {
        "rows": short,
        "shuffled": [{**own, "colour": other} for own, other in zip(short, mixed)],
        "foreign": foreign,
        "both": short[:160] + choices[:160],
        "easy_or_hard": [{**own, "colour": own["colour"] if at % 2 else "rot"} for at, own in enumerate(choices)],
    }
    for name, content in files.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in content))


def flags(settings):
    given = []
    for name, value in settings.items():
        given += [f"--{name}", *(str(value).lower() if isinstance(value, bool) else str(value).replace("e-0", "e-")).split(" ")]
    return given


def execute(program, name, own):
    run = f"runs/{name}"
    with open(f"{name}.log", "w") as log:
        subprocess.run([program, "train", *flags({**COMMON, **own}), "--output_dir", run], stdout=log, stderr=log, check=False)
    verdict = json.loads(subprocess.run([program, "diagnose", run, "--json"], capture_output=True, text=True, check=True).stdout)
    said = subprocess.run([program, "diagnose", run], capture_output=True, text=True, check=True).stdout.strip()
    events = [json.loads(line) for line in Path(run, "events.jsonl").read_text().splitlines()]
    problems = [{"step": event["step"], "rule": event["rule"], "text": f"{event['title']}: {event['what']}"} for event in events
                if event["kind"] == "problem" and event["begins"]]
    subprocess.run([program, "report", run], capture_output=True, check=True)
    return verdict, said, problems, Path(run, "plots")


def clean(text, folder):
    """The text without the folder of this machine."""
    return text.replace(f"{folder}/", "")


def blocks(record):
    """What the page shows of each run."""
    shown = {}
    for name, run in record["runs"].items():
        differ = " ".join(flags(run["settings"]))
        lines = [f"Settings that differ: `{differ}`", ""] if run["settings"] else []
        lines += [f"![Chart of the run {name}](images/{name}.svg)", "", "```text"]
        lines += textwrap.wrap(run["problem"], 84) + [""] if run["problem"] else []
        lines += [line for part in run["verdict"].splitlines() for line in textwrap.wrap(part, 84) or [""]]
        shown[f"{name}: tools/book/illnesses.py"] = "\n".join([*lines, "```"])
    return shown


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("program", nargs="?")
    arguments.add_argument("names", nargs="*")
    arguments.add_argument("--check", action="store_true")
    arguments.add_argument("--keep", type=Path, help="folder for the runs; without it they are removed")
    arguments = arguments.parse_args()
    if arguments.check:
        return fill(PAGE, blocks(json.loads(RECORD.read_text())), check=True)
    program = str(Path(arguments.program).resolve())
    record = json.loads(RECORD.read_text()) if RECORD.exists() and arguments.names else {"runs": {}}
    wrong = []
    folder = arguments.keep or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    os.chdir(folder)
    if not Path("model").exists():
        subprocess.run([program, "demo", "--max_steps", "1", "--output_dir", "demo"], capture_output=True, check=True)
        shutil.copytree("demo/start-model", "model")
    rows(Path("demo/data"))
    Path("rewards.py").write_text(REWARDS)
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, (rule, chart, own) in RUNS.items():
        if arguments.names and name not in arguments.names:
            continue
        shutil.rmtree(f"runs/{name}", ignore_errors=True)
        verdict, said, problems, plots = execute(program, name, own)
        problem = next((one for one in problems if one["rule"] == rule), None)
        if (problem is None) != (rule == "none"):
            wrong.append(f"{name}: expected the rule {rule}, got {[(one['step'], one['rule']) for one in problems] or 'no problem'}")
        text = clean(problem["text"], folder) if problem else ""
        record["runs"][name] = {"settings": own, "problem": f"step {problem['step']}: {text}" if problem else "", "verdict": clean(said, folder)}
        shutil.copy(plots / f"{chart}.svg", IMAGES / f"{name}.svg")
        print(f"{name}: {said.splitlines()[0]}", flush=True)
    record = {**machine("python3 tools/book/illnesses.py PROGRAM"), "common": COMMON, "runs": {name: record["runs"][name] for name in RUNS if name in record["runs"]}}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    if not arguments.keep:
        os.chdir(ROOT)
        shutil.rmtree(folder)
    if PAGE.exists():
        fill(PAGE, blocks(record), check=False)
    for line in wrong:
        print(line, file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
