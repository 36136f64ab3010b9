#!/usr/bin/env python3
"""Resumes runs from every step, and compares what each leaves with the uninterrupted run: weights, moments, state, rollouts, numbers
per token and metrics, byte for byte (but for clocks and memory).

    python3 tools/reliability/resumes.py target/debug/omnigrpo
    python3 tools/reliability/resumes.py --list

The runs are rows of a table in which every pair of the values below occurs at least once. The script makes the table, checks it, and
tries each pair that is left out. A run has all updates of a rollout and two of the next one. A run of two ranks resumes
from every other step as one process. Kills at random moments find faults in the state of a rollout rarely (kills.py).

Only Linux, Python's standard library and an mpirun are needed. What differed is kept below OUT.
"""

import argparse
import concurrent.futures
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

from kills import GOLDEN, ROOT, Difference, compare

BASE = "train --reward_funcs random --learning_rate 1e-3 --log_token_stats --threads 1 --save_steps 1"
ALONE, RANKS = "--gradient_accumulation_steps 2", "--gradient_accumulation_steps 1 --nproc_per_node 2"
ADAPTERS = "--use_peft --lora_r 4 --lora_alpha 8"
# Nearly uniform draws end some turns of a random model.
TURNS = "--num_generations 6 --max_completion_length 140 --temperature 8 --logprob_temperature 1 --max_turns 2 --environment ENVIRONMENT"
# Values of each property of a run, with their flags.
TABLE = {
    "model": {name: f"--model {GOLDEN}/checkpoints/{name}" for name in ["qwen2_5_vl_tied", "qwen3_vl", "internvl_hf"]},
    "rows": {"pictures in every part": "--train_file pictures.jsonl", "few pictures": "--train_file mixed.jsonl"},
    "iterations": {f"{n} iterations": f"--num_iterations {n}" for n in [2, 3]},
    "steps": {f"{n} steps a generation": f"--steps_per_generation {n}" for n in [2, 3]},
    "trained": {
        "language model": "--tune_mm_mlp false --tune_mm_vision false",
        "projector": "--tune_mm_mlp true --tune_mm_vision false",
        "tower": "--tune_mm_mlp false --tune_mm_vision true",
        "tower and projector": "--tune_mm_mlp true --tune_mm_vision true",
        "adapters": ADAPTERS,
        "adapters and projector": f"{ADAPTERS} --tune_mm_mlp true",
        "adapters and tower": f"{ADAPTERS} --tune_mm_vision true",
    },
    "bits": {"as published": "", "8 bits": "--load_in_8bit", "4 bits": "--load_in_4bit"},
    "environment": {"one turn": "--num_generations 2 --max_completion_length 6 --min_completion_length 6", "turns": TURNS},
    "processes": {"one process": ALONE, "two ranks": RANKS, "cut weights": f"{RANKS} --shard weights --shard_min_elements 0"},
    "reference": {
        "no reference": "--beta 0",
        "fixed reference": "--beta 0.1",
        "moving reference": "--beta 0.1 --sync_ref_model --ref_model_sync_steps 1 --ref_model_mixup_alpha 0.5",
    },
    "gate": {"all tokens": "", "entropy gate": "--top_entropy_quantile 0.4"},
    "correction": {
        "no correction": "",
        "truncated tokens": "--importance_sampling_correction token_truncate",
        "masked sequences": "--importance_sampling_correction sequence_mask",
    },
    "sampling": {"each group": "", "dynamic sampling": "--max_resample_times 2"},
}  # fmt: skip
# Pairs that the settings refuse, with a part of the message.
WITH_ADAPTERS = ["adapters", "adapters and projector", "adapters and tower"]
REFUSED = {(trained, "moving reference"): "unsupported with adapters" for trained in WITH_ADAPTERS} | {
    (trained, bits): "adapters" for trained in TABLE["trained"] if trained not in WITH_ADAPTERS for bits in ["8 bits", "4 bits"]
}
# Pairs that say nothing: the settings accept them with this warning, but no weight of the checkpoint has few bits then.
IDLE = {("internvl_hf", bits): "their rows are shorter than a group" for bits in ["8 bits", "4 bits"]}
# An environment that answers each turn with the picture of the row, with another one, or with a word.
ENVIRONMENT = """
import json, os, sys
other = os.path.join(os.path.dirname(os.path.abspath(__file__)), "noise.png")
for line in sys.stdin:
    request = json.loads(line)
    answer = {"id": request["id"]}
    if request.get("probe"):
        answer["answers_text"] = True
    elif request["turn"] == 1:
        own = [path for path in request["media"] if path.endswith(".png")]
        answer["answer"] = [{"type": "image", "image": own[0] if own and request["sample"] else other}]
    else:
        answer["answer"] = "look"
    print(json.dumps(answer), flush=True)
"""
ENVIRONMENT_OF_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
LIMIT_SECS = 600


def refused(a, b):
    return any(pair in pairs for pair in [(a, b), (b, a)] for pairs in [REFUSED, IDLE])


def goes_together(a, b):
    """Whether a run can have both values: they do not refuse each other, and no property is left without a value."""
    others = (values for values in TABLE.values() if a not in values and b not in values)
    return not refused(a, b) and all(any(not refused(a, v) and not refused(b, v) for v in values) for values in others)


def pairs_of(row):
    return {frozenset(pair) for pair in itertools.combinations(row, 2)}


def all_pairs():
    """Pairs of values of two properties: those that go together, and the others."""
    pairs = [pair for a, b in itertools.combinations(TABLE.values(), 2) for pair in itertools.product(a, b)]
    return [pair for pair in pairs if goes_together(*pair)], [pair for pair in pairs if not goes_together(*pair)]


def covering(seed):
    """Rows of values, one per property, that contain every pair that goes together."""
    draw = random.Random(seed)

    def row_with(pair):
        while True:
            row = [next((v for v in pair if v in values), None) or draw.choice(list(values)) for values in TABLE.values()]
            if not any(refused(a, b) for a, b in itertools.combinations(row, 2)):
                return row

    wanted = all_pairs()[0]
    left, rows = {frozenset(pair) for pair in wanted}, []
    while left:
        pair = next(pair for pair in wanted if frozenset(pair) in left)
        rows.append(max((row_with(pair) for _ in range(200)), key=lambda row: len(pairs_of(row) & left)))
        left -= pairs_of(rows[-1])
    return rows


def check_table(rows):
    """Every pair that goes together occurs, and none of the others."""
    wanted, others = all_pairs()
    found = set().union(*map(pairs_of, rows))
    missing = [pair for pair in wanted if frozenset(pair) not in found]
    assert not missing, f"pairs that no run has: {missing}"
    assert not [pair for pair in others if frozenset(pair) in found]
    assert all(len(row) == len(TABLE) for row in rows)
    return wanted, others


class Bench:
    """A run of the table, and its resumes."""

    def __init__(self, binary, row, place):
        self.binary, self.row, self.place = binary, row, place
        place.mkdir(parents=True)
        seen = {"problem": "<image>What is it?", "solution": "<answer>a</answer>"}
        pictures = [seen | {"id": f"{name}-{i}", "image": f"{name}.png"} for i in range(4) for name in ["shapes", "noise"]]
        sums = [{"id": f"sum-{i}", "problem": f"What is {i}+3?", "solution": f"<answer>{i + 3}</answer>"} for i in range(8)]
        for name, rows in [("pictures", pictures), ("mixed", [*sums, *pictures[:3]])]:
            (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name in ["shapes.png", "noise.png"]:
            shutil.copy(GOLDEN / "media" / name, place / name)
        (place / "environment.py").write_text(ENVIRONMENT)
        iterations, steps = (int(next(v for v in row if v in TABLE[name])[0]) for name in ["iterations", "steps"])
        self.steps = iterations * steps + 2

    def start(self, values, out):
        """Starts the program and returns its exit code and its console."""
        flags = " ".join([BASE, *(values_of[v] for v in values for values_of in TABLE.values() if v in values_of)])
        environment = f"cmd:{sys.executable} {self.place / 'environment.py'}"
        words = [environment if word == "ENVIRONMENT" else word for word in flags.split()]
        words += ["--max_steps", str(self.steps), "--output_dir", str(out)]
        told = subprocess.run([self.binary, *words], cwd=self.place, env=os.environ | ENVIRONMENT_OF_MPI | {"HF_HUB_OFFLINE": "1"},
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=LIMIT_SECS)  # fmt: skip
        return told.returncode, told.stderr

    def run(self):
        """Returns the number of resumes and a line for each that differs."""
        run, whole = self.place / "run", self.place / "whole"
        code, told = self.start(self.row, run)
        if code:
            return 0, [f"the run ended with {code}: {told[-600:]}"]
        # Every start writes to the same directory, because the state has paths of pictures in it.
        run.rename(whole)
        if "turns" in self.row and not any(turn["media"] for turn in turns(whole)):
            return 0, ["no turn has a picture"]
        differing = []
        for step in range(1, self.steps):
            shutil.copytree(whole, run)
            forget(run, step)
            values = ["one process" if v in ("two ranks", "cut weights") and step % 2 == 0 else v for v in self.row]
            code, told = self.start(values, run)
            try:
                if code or f"at step {step} of {self.steps}" not in told:
                    raise Difference(f"the run did not resume; exit code {code}: {told[-600:]}")
                compare(whole, run, False)
                shutil.rmtree(run)
            except Difference as difference:
                differing.append(f"from step {step}: {difference}")
                run.rename(self.place / f"from-{step}")
        return self.steps - 1, differing


def turns(run):
    """Turns of the environment in all rollouts of a run."""
    lines = [line for path in (run / "rollouts").iterdir() for line in path.read_text().splitlines()]
    return [turn for line in lines for turn in json.loads(line).get("turns", [])]


def forget(run, step):
    """Removes what a run wrote after a step, except for lines of logs."""
    later = [path for path in run.iterdir() if path.suffix == ".safetensors"]
    later += [path for path in run.glob("checkpoint-*") if int(path.name.split("-")[1]) > step]
    later += [path for folder in ["rollouts", "tokens"] for path in (run / folder).iterdir() if int(path.stem.split("-")[1]) > step]
    for path in later:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def try_left_out(binary, place):
    """Starts a run with each pair that is left out, and returns a line for each that does not end as expected."""
    wrong = []
    for number, ((a, b), expected) in enumerate((REFUSED | IDLE).items()):
        row = [next((v for v in (a, b) if v in values), None) or next(iter(values)) for values in TABLE.values()]
        if (a, b) in IDLE:
            row = ["adapters" if v in TABLE["trained"] else v for v in row]
        bench = Bench(binary, row, place / f"left-out-{number}")
        bench.steps = 1
        code, told = bench.start(row, "run")
        codes = [0] if (a, b) in IDLE else [1, 2]
        if code not in codes or expected not in told:
            wrong.append(f"{a} with {b}: exit code {code}, expected {codes} and {expected!r}: {told[-300:]}")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("binary", type=Path, nargs="?")
    parser.add_argument("--list", action="store_true", help="print the runs and the pairs that are left out, and stop")
    parser.add_argument("--runs", help="numbers of the runs to make, such as 0,3; all without it")
    parser.add_argument("--seed", type=int, default=1, help="seed of the table")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/resumes")
    args = parser.parse_args()
    rows = covering(args.seed)
    wanted, others = check_table(rows)
    print(f"{len(rows)} runs have all {len(wanted)} pairs of values; left out:")
    print(*(f"  {a} with {b}" for a, b in others), sep="\n")
    if args.list:
        print(*(f"{number}: {', '.join(row)}" for number, row in enumerate(rows)), sep="\n")
        return 0
    if args.binary is None:
        parser.error("the path of the program is missing")
    binary = str(args.binary.resolve(strict=True))
    chosen = [int(number) for number in args.runs.split(",")] if args.runs else range(len(rows))
    shutil.rmtree(args.out, ignore_errors=True)
    failed = try_left_out(binary, args.out)
    began, resumes, unequal = time.monotonic(), 0, 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        benches = [(n, Bench(binary, rows[n], (args.out / str(n)).resolve())) for n in chosen]
        for (number, bench), (done, differing) in zip(benches, pool.map(lambda own: own[1].run(), benches)):
            resumes, unequal = resumes + done, unequal + len(differing)
            failed += [f"run {number}: {line}" for line in differing]
            print(f"{number}: {', '.join(bench.row)}: {done} resumes,", "equal" if not differing else f"{len(differing)} differ", flush=True)
            if not differing:
                shutil.rmtree(bench.place)
    print(f"{len(chosen)} runs, {resumes} resumes, {resumes - unequal} equal, in {(time.monotonic() - began) / 60:.1f} minutes")
    print(*failed, sep="\n", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
