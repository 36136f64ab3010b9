#!/usr/bin/env python3
"""Kills runs at random moments, starts them again until they are done, and compares what they leave with an uninterrupted
run: weights, moments, state, rollouts, numbers per token, metrics and evaluations, byte for byte (but for clocks and memory).

    python3 tools/reliability/kills.py target/debug/omnigrpo
    python3 tools/reliability/kills.py target/debug/omnigrpo --kills 200 --cases "full disk,LoRA with dropout"

Only Linux and Python's standard library are needed. A third of the kills wait for a checkpoint or a log to be half written;
one in ten is a SIGTERM, SIGINT, SIGHUP or SIGUSR1, which must save and end with 75. After every end each checkpoint is compared with its
SHA256SUMS. The full-disk case mounts a tmpfs and is skipped where that is not allowed.

Every sequence of kills is a line of OUT/results.jsonl, so a suite that was interrupted goes on where it stopped; lines of
another program, seed or number of steps are left alone. A sequence depends on the seed, its case and its number, but for the
moments, which depend on the machine. What differed is kept below OUT/failures.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "crates/models/tests/golden"
STOPPED = 75
# Signals that ask for a checkpoint and a stop.
ASKED = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]
SMALL = " --max_completion_length 6 --min_completion_length 6 --threads 1"
TRAIN = (
    "train --train_file rows.jsonl --reward_funcs random --learning_rate 1e-3 --num_generations 2 --gradient_accumulation_steps 2"
    " --log_token_stats" + SMALL
)
SFT = "sft --train_file rows.jsonl --learning_rate 1e-3 --gradient_accumulation_steps 2 --threads 1"
STEPS, SAVES = " --max_steps {steps}", " --save_steps 3"
LORA = " --use_peft --lora_r 4 --lora_alpha 8"
EVAL = " --eval_file rows.jsonl --eval_steps 4 --eval_on_start"
F32, BF16, TILES, SOUND = "qwen2_5_vl_tied", "qwen2_5_vl_tied_bf16", "internvl_hf", "humanomni"
RUN = STEPS + SAVES
# Nearly uniform draws end some turns of a random model. A line is split at white space, so a `+` stands for the space in the command.
TURNS = (
    TRAIN.replace("length 6", "length 90").replace("--min_completion_length 90 ", "")
    + " --num_iterations 2 --temperature 8 --logprob_temperature 1 --max_turns 2 --environment cmd:python3+environment.py"
)
# An environment that answers every turn with the picture of the row, or a word.
ENVIRONMENT = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    answer = {"id": request["id"]}
    if request.get("probe"):
        answer["answers_text"] = True
    else:
        media = [path for path in request["media"] if path.endswith(".png")]
        answer["answer"] = [{"type": "image", "image": media[0]}] if media else "look"
    print(json.dumps(answer), flush=True)
"""
# Name, checkpoint, command, what is done to it.
CASES = [
    ("f32", F32, TRAIN + RUN, "kill"),
    ("bf16", BF16, TRAIN + RUN, "kill"),
    ("bf16 without masters", BF16, TRAIN + RUN + " --pure_bf16", "kill"),
    ("few bits", BF16, TRAIN + RUN + " --optim adamw_8bit --grad_dtype bfloat16 --pure_bf16 --stochastic_rounding", "kill"),
    ("LoRA with dropout", F32, TRAIN + RUN + LORA + " --lora_dropout 0.2", "kill"),
    ("LoRA on 8 bits", F32, TRAIN + RUN + LORA + " --load_in_8bit", "kill"),
    ("sft", F32, SFT + RUN, "kill"),
    ("sft of adapters", BF16, SFT + RUN + LORA, "kill"),
    ("two updates a rollout", F32, TRAIN + RUN + " --num_iterations 2", "kill"),
    ("turns of an environment", F32, TURNS + RUN, "kill"),
    ("dapo with order of frames", F32, TRAIN.replace("random", "random accuracy") + RUN + " --loss_type dapo --temporal_order_bonus", "kill"),
    ("pictures in tiles", TILES, TRAIN + RUN, "kill"),
    ("with sound", SOUND, TRAIN.replace("rows", "heard") + RUN, "kill"),
    ("rows that break late", F32, TRAIN.replace("rows", "broken") + RUN + " --skip_data_check --max_skipped 0.5", "kill"),
    ("epochs", F32, TRAIN + " --num_train_epochs 2 --save_strategy epoch", "kill"),
    ("evaluations", F32, TRAIN + RUN + EVAL, "kill"),
    ("best checkpoint", F32, TRAIN + STEPS + EVAL + " --save_strategy best", "kill"),
    ("two checkpoints kept", F32, TRAIN + RUN + " --save_total_limit 2", "kill"),
    ("models only", F32, TRAIN + RUN + " --save_only_model", "kill"),
    # A second start waits a moment for the first, so the first must live longer than that.
    ("two starts at once", F32, TRAIN + RUN.replace("{steps}", "200"), "twice"),
    ("full disk", F32, TRAIN + RUN + EVAL, "full"),
    ("generate", F32, "generate --input many.jsonl --num_generations 2 --temperature 0.7 --batch_size 2" + SMALL, "answers"),
    ("eval", F32, "eval --eval_file many.jsonl --reward_funcs random,accuracy --batch_size 2" + SMALL, "answers"),
]


class Difference(Exception):
    pass


class Bench:
    """One case: its uninterrupted run, and sequences of kills that are compared with it."""

    def __init__(self, args, case, place):
        self.binary, (self.name, model, line, self.kind), self.place = args.binary, case, place
        words = line.format(steps=args.steps).split()
        self.words = [*(word.replace("+", " ") for word in words), "--model", str(GOLDEN / "checkpoints" / model)]
        place.mkdir()
        rows = [{"id": f"sum-{i}", "problem": f"What is {i}+3?", "solution": f"<answer>{i + 3}</answer>"} for i in range(60)]
        seen = {"problem": "<image>What is it?", "solution": "<answer>a</answer>"}
        pictures = [seen | {"id": name, "image": name} for name in ["shapes.png", "noise.png"]]
        clip = {"id": "clip", "video": "clip.gif", "max_pixels": 12544, "problem": "<video>Which way?", "solution": "up"}
        heard = {"id": "rise", "audio": "rise.wav", "problem": "<audio>What is it?", "solution": "a"}
        for name in ["shapes.png", "noise.png", "clip.gif", "rise.wav"]:
            shutil.copy(GOLDEN / "media" / name, place / name)
        (place / "cut.png").write_bytes((place / "shapes.png").read_bytes()[:60])
        (place / "environment.py").write_text(ENVIRONMENT)
        self.write("rows", [*rows[:7], *pictures, clip])
        self.write("heard", [*rows[:7], pictures[0], heard])
        self.write("broken", [*rows[:7], pictures[0], seen | {"id": "cut", "image": "cut.png"}])
        self.write("many", [*rows, *pictures])
        self.whole = place / "whole"
        began = time.monotonic()
        if (code := self.finish(self.whole)) != 0:
            sys.exit(f"{self.name}: the uninterrupted run failed ({code}): {self.said()}")
        self.secs = time.monotonic() - began
        logs = [path.read_text() for path in self.whole.glob("rollouts/*.jsonl")]
        if "--environment" in self.words and not any('"model_tokens"' in log for log in logs):
            sys.exit(f"{self.name}: the environment has answered no turn")
        self.bytes = sum(path.stat().st_size for path in self.whole.rglob("*") if path.is_file())

    def write(self, name, rows):
        (self.place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def command(self, out):
        if self.kind != "answers":
            return [self.binary, *self.words, "--output_dir", str(out)]
        out.mkdir(exist_ok=True)
        return [self.binary, *self.words, "--output", str(out / "answers.jsonl")]

    def start(self, out):
        env = os.environ | {"XDG_CACHE_HOME": str(self.place / ".cache"), "HF_HUB_OFFLINE": "1"}
        with open(self.place / "stderr.txt", "w") as log:
            return subprocess.Popen(
                self.command(out), cwd=self.place, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, env=env
            )

    def said(self):
        return (self.place / "stderr.txt").read_text(errors="replace")[-400:]

    def finish(self, out):
        process = self.start(out)
        try:
            return process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise Difference(f"no end within 120 s: {self.said()}") from None

    def sequence(self, rng, kills, figures):
        """Kills one run up to `kills` times, then leaves it alone, and compares."""
        out = self.place / "cut"
        {"kill": self.kill, "answers": self.kill, "twice": self.start_twice, "full": self.fill}[self.kind](rng, kills, figures, out)
        if self.kind == "answers":
            if sorted(os.listdir(out)) != sorted(os.listdir(self.whole)):
                raise Difference(f"files {sorted(os.listdir(out))}")
            same_bytes(self.whole, out, os.listdir(self.whole))
        else:
            compare(self.whole, out, any(word in ("best", "--save_total_limit") for word in self.words))

    def kill(self, rng, kills, figures, out):
        for _ in range(kills):
            process = self.start(out)
            how, targeted = rng.random(), rng.random() < 1 / 3
            deadline = time.monotonic() + rng.uniform(0, 1.05 * self.secs)
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.001)
            hit = False
            while targeted and process.poll() is None and not hit:
                hit = half_written(out)
            if process.poll() is None:
                kind = signal.SIGKILL if how > 0.1 else rng.choice(ASKED)
                process.send_signal(kind)
                code = process.wait()
                figures["kills"] += 1
                figures["saving"] += hit
                if kind != signal.SIGKILL:
                    figures["signals"] += 1
                    # Before the handler is in place the signal ends it; at the last step the run just finishes.
                    if code not in (STOPPED, 0, -kind):
                        raise Difference(f"signal {kind} ended it with {code}: {self.said()}")
            elif process.returncode != 0:
                raise Difference(f"it failed by itself ({process.returncode}): {self.said()}")
            check_checkpoints(out)
        self.last_start(out)

    def start_twice(self, rng, kills, figures, out):
        """A second start is refused while the first lives, and takes over at once when it is killed."""
        for _ in range(kills):
            first = self.start(out)
            time.sleep(rng.uniform(0, self.secs))
            if first.poll() is None:
                second = subprocess.run(self.command(out), cwd=self.place, capture_output=True, text=True)
                refused = second.returncode == 1 and "is in use" in second.stderr
                # The second can take the lock before the first, or after the first has done its last step.
                if not refused and first.poll() is None and first.wait(120) not in (0, 1) or second.returncode not in (0, 1):
                    raise Difference(f"two starts ended with {first.poll()} and {second.returncode}: {second.stderr[-400:]}")
            if first.poll() is None:
                first.kill()
                figures["kills"] += 1
            first.wait()
            check_checkpoints(out)
        self.last_start(out)

    def fill(self, rng, _, figures, out):
        """A disk of a random size that fills up, then more space."""
        disk = self.place / "disk"
        disk.mkdir()
        mount(["-t", "tmpfs", "-o", f"size={int(rng.uniform(0.02, 1.0) * self.bytes) // 1024 + 4}k", "none", str(disk)])
        try:
            code = self.finish(disk)
            figures["kills"] += code != 0
            if code not in (0, 1):
                raise Difference(f"a full disk ended it with {code}: {self.said()}")
            if code == 1 and "free some space" not in self.said() and "No space left" not in self.said():
                raise Difference(f"the reason is not named: {self.said()}")
            check_checkpoints(disk)
            left = [name for name in os.listdir(disk) if name.startswith("tmp-checkpoint-")]
            if left:
                raise Difference(f"left behind on a full disk: {left}")
            mount(["-o", "remount,size=256m", str(disk)])
            self.last_start(disk)
        finally:
            shutil.copytree(disk, out, dirs_exist_ok=True)
            subprocess.run(["umount", str(disk)], check=True)
            disk.rmdir()

    def last_start(self, out):
        if (code := self.finish(out)) != 0:
            raise Difference(f"the last start failed ({code}): {self.said()}")
        check_checkpoints(out)


def run_case(args, case, place, done, record):
    """Sequences until the case has its share of kills; what was recorded before counts."""
    number, share, name = len(done), args.share, case[0]
    kills = sum(line["kills"] for line in done)
    if kills >= share:
        return None
    bench = Bench(args, case, place / name.replace(" ", "_"))
    # Some starts are over before their kill; a bound keeps a case from going on for ever.
    while kills < share and number < 3 * share + 3:
        number += 1
        rng = random.Random(f"{args.seed} {name} {number}")
        figures, why, began = {"kills": 0, "saving": 0, "signals": 0}, None, time.monotonic()
        try:
            bench.sequence(rng, min(rng.randint(1, 8), share - kills), figures)
        except PermissionError as error:
            return f"skipped: {error}"
        except Difference as difference:
            why = str(difference)
            print(f"{name}, sequence {number}: {why}", file=sys.stderr, flush=True)
            kept = args.out / "failures" / f"{name.replace(' ', '_')}-{number}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(bench.place, kept, symlinks=True)
        kills += figures["kills"]
        record({"case": name, "number": number, **figures, "secs": round(time.monotonic() - began, 2), "why": why})
        shutil.rmtree(bench.place / "cut", ignore_errors=True)
    print(f"{name}: {kills} kills in {number} sequences", flush=True)
    return None


def mount(arguments):
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise PermissionError(done.stderr.strip())


def half_written(out):
    try:
        with os.scandir(out) as entries:
            return any(e.name.startswith("tmp-") or e.name.endswith(".tmp") for e in entries)
    except FileNotFoundError:
        return False


def checkpoints(out):
    return {p.name: p for p in out.glob("checkpoint-*") if (p / "trainer_state.json").is_file()}


def check_checkpoints(out):
    """Every checkpoint that can be seen is complete."""
    for path in checkpoints(out).values():
        listed = [line.split("  ", 1) for line in (path / "SHA256SUMS").read_text().splitlines()]
        for digest, name in listed:
            if hashlib.sha256((path / name).read_bytes()).hexdigest() != digest:
                raise Difference(f"{path / name} is not what was saved")
        if not {"trainer_state.json"} <= {name for _, name in listed}:
            raise Difference(f"{path} has no sum of its state")


def timeless(path, drop):
    """Rows of a log without what a clock or the system says."""
    text = path.read_text() if path.is_file() else ""
    # Copies of an environment's pictures are in the folder of the run.
    text = re.sub(r'"[^"]*/media/', '"media/', text)
    rows = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(drop)} for row in rows]


def compare(whole, cut, limited):
    models = [p.name for p in whole.iterdir() if p.name.endswith(".safetensors") or p.name.endswith("config.json")]
    same_bytes(whole, cut, models)
    ours, theirs = checkpoints(whole), checkpoints(cut)
    # An interruption adds checkpoints, and a limit then removes others.
    if not limited and not ours.keys() <= theirs.keys():
        raise Difference(f"checkpoints {sorted(theirs)}, expected {sorted(ours)}")
    for name in ours.keys() & theirs.keys():
        files = [p.name for p in ours[name].iterdir() if (theirs[name] / p.name).is_file()]
        # The checkpoint of an interruption has moments where the others have none, and says so.
        sums = {"SHA256SUMS", "trainer_state.json"}
        alike = {p.name for p in ours[name].iterdir()} == {p.name for p in theirs[name].iterdir()}
        same_bytes(ours[name], theirs[name], [f for f in files if alike or f not in sums])
    drop = ("time/", "memory/", "machine/", "step_time", "data/ahead_time")
    same_rows(whole / "metrics.jsonl", cut / "metrics.jsonl", drop)
    same_rows(whole / "skipped.jsonl", cut / "skipped.jsonl", ())
    for folder in ["rollouts", "tokens", "eval"]:
        names = [sorted(os.listdir(run / folder)) if (run / folder).is_dir() else [] for run in (whole, cut)]
        if names[0] != names[1]:
            raise Difference(f"{folder}: {sorted(set(names[0]) ^ set(names[1]))} in one only")
        for name in names[0]:
            if folder != "rollouts":
                same_bytes(whole / folder, cut / folder, [name])
            else:
                same_rows(whole / folder / name, cut / folder / name, ("timestamp",))
    left = [name for name in os.listdir(cut) if name.startswith("tmp-") or name.endswith(".tmp")]
    if left:
        raise Difference(f"left behind: {left}")


def same_bytes(whole, cut, names):
    for name in names:
        if not (cut / name).is_file() or (whole / name).read_bytes() != (cut / name).read_bytes():
            raise Difference(f"{cut / name} differs")


def same_rows(whole, cut, drop):
    a, b = timeless(whole, drop), timeless(cut, drop)
    for number, (x, y) in enumerate(zip(a, b), 1):
        if x != y:
            keys = [k for k in x.keys() | y.keys() if x.get(k) != y.get(k)]
            raise Difference(f"{cut}:{number}: {keys[:3]} differ at step {x.get('step')}")
    if len(a) != len(b):
        raise Difference(f"{cut}: {len(b)} rows, expected {len(a)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("binary", type=Path)
    parser.add_argument("--kills", type=int, default=1000, help="kills in all, spread over the cases")
    parser.add_argument("--cases", default=",".join(name for name, *_ in CASES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12, help="steps of each run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases at a time")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/kills")
    args = parser.parse_args()
    args.binary, args.out = str(args.binary.resolve(strict=True)), args.out.resolve()
    wanted = args.cases.split(",")
    cases = [case for case in CASES if case[0] in wanted]
    if unknown := set(wanted) - {name for name, *_ in cases}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    args.share = -(-args.kills // len(cases))
    digest = hashlib.sha256(Path(args.binary).read_bytes()).hexdigest()[:12]
    this = {"binary": digest, "seed": args.seed, "steps": args.steps}
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "results.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    lines = [line for line in lines if this.items() <= line.items()]
    print(f"{args.share} kills in each of {len(cases)} cases; {sum(line['kills'] for line in lines)} kills were done before")

    def record(line):
        lines.append(this | line)
        with open(log, "a") as file:
            file.write(json.dumps(lines[-1]) + "\n")

    # In memory if possible: what a kill leaves does not depend on the disk, and the disk is what takes the time.
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="omnigrpo-kills-", dir=shm) as place:
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            of = lambda name: [line for line in lines if line["case"] == name]
            jobs = {case[0]: pool.submit(run_case, args, case, Path(place), of(case[0]), record) for case in cases}
            skipped = {name: job.result() for name, job in jobs.items()}
    print("\n| case | kills | while saving | by signal | sequences | equal | s a kill |")
    print("|---|---|---|---|---|---|---|")
    for name in [*jobs, "all"]:
        part = [line for line in lines if name in (line["case"], "all")]
        kills, saving, signals, secs = (sum(line[key] for line in part) for key in ("kills", "saving", "signals", "secs"))
        equal = sum(line["why"] is None for line in part)
        print(f"| {name} | {kills} | {saving} | {signals} | {len(part)} | {equal} | {skipped.get(name) or f'{secs / max(kills, 1):.2f}'} |")
    sys.exit(any(line["why"] for line in lines))


if __name__ == "__main__":
    main()
