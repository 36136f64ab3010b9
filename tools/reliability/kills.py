#!/usr/bin/env python3
"""Kills training runs at random moments, starts them again until they are done, and compares what they leave with an
uninterrupted run: weights, moments, state, rollouts, metrics and evaluations, byte for byte (but for clocks and memory).

    cargo build --release
    python3 tools/reliability/kills.py --kills 1000 --seed 1

Only the standard library is needed. A third of the kills wait for a checkpoint or a log to be half written; one in ten is
a SIGTERM, SIGINT or SIGHUP, which must save and end with 75. After every end each checkpoint is compared with its
SHA256SUMS. The disk-full case mounts a tmpfs and is skipped where that is not allowed.
"""

import argparse
import hashlib
import json
import os
import random
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
TRAIN = (
    "train --train_file rows.jsonl --reward_funcs random --learning_rate 1e-3 --num_generations 4"
    " --gradient_accumulation_steps 2 --max_completion_length 12 --min_completion_length 12"
)
SFT = "sft --train_file rows.jsonl --learning_rate 1e-3 --gradient_accumulation_steps 2"
EVAL = " --eval_file rows.jsonl --eval_steps 4 --eval_on_start"
F32, BF16 = "qwen2_5_vl_tied", "qwen2_5_vl_tied_bf16"
# Name, checkpoint, command.
CASES = [
    ("f32", F32, TRAIN),
    ("bf16", BF16, TRAIN),
    ("LoRA with dropout", F32, TRAIN + " --use_peft --lora_r 4 --lora_alpha 8 --lora_dropout 0.2"),
    ("sft", F32, SFT),
    ("two updates a rollout", F32, TRAIN + " --num_iterations 2"),
    ("evaluations", F32, TRAIN + EVAL),
    ("best checkpoint", F32, TRAIN + EVAL + " --save_strategy best"),
    ("two checkpoints kept", F32, TRAIN + " --save_total_limit 2"),
    ("models only", F32, TRAIN + " --save_only_model"),
]


class Difference(Exception):
    pass


class Bench:
    def __init__(self, args, place):
        self.args, self.place = args, place
        self.random = random.Random(args.seed)
        rows = [
            {"id": f"sum-{i}", "problem": f"What is {i}+3?", "solution": f"<answer>{i + 3}</answer>"} for i in range(9)
        ]
        for name in ["shapes.png", "noise.png"]:
            shutil.copy(GOLDEN / "media" / name, place / name)
            rows.append({"id": name, "image": name, "problem": "<image>What is it?", "solution": "<answer>a</answer>"})
        (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def command(self, model, line, out):
        words = line.split() + ["--save_steps", "5"] * ("--save_strategy" not in line)
        words += ["--model", str(GOLDEN / "checkpoints" / model), "--max_steps", str(self.args.steps)]
        return [self.args.binary, *words, "--threads", "1", "--output_dir", str(out)]

    def start(self, command):
        log = open(self.place / "stderr.txt", "w")
        process = subprocess.Popen(
            command, cwd=self.place, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log
        )
        log.close()
        return process

    def said(self):
        return (self.place / "stderr.txt").read_text(errors="replace")

    def finish(self, command, limit=600):
        process = self.start(command)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise Difference(f"no end within {limit} s: {self.said()[-400:]}")

    def whole(self, model, line, out):
        began = time.monotonic()
        code = self.finish(self.command(model, line, out))
        if code != 0:
            sys.exit(f"the uninterrupted run failed ({code}): {self.said()}")
        return time.monotonic() - began

    def sequence(self, model, line, out, secs, kills, figures):
        """One run: killed `kills` times, then left alone."""
        command = self.command(model, line, out)
        for _ in range(kills):
            process = self.start(command)
            how, targeted = self.random.random(), self.random.random() < 1 / 3
            deadline = time.monotonic() + self.random.uniform(0, 1.05 * secs)
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.002)
            hit = False
            while targeted and process.poll() is None and not hit:
                hit = half_written(out)
            if process.poll() is None:
                kind = signal.SIGKILL if how > 0.1 else self.random.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
                process.send_signal(kind)
                code = process.wait()
                figures["kills"] += 1
                figures["saving"] += hit
                if kind != signal.SIGKILL:
                    figures["signals"] += 1
                    # Before the handler is in place the signal ends it; at the last step the run just finishes.
                    if code not in (STOPPED, 0, -kind):
                        raise Difference(f"signal {kind} ended it with {code}: {self.said()[-400:]}")
            elif process.returncode != 0:
                raise Difference(f"it failed by itself ({process.returncode}): {self.said()[-400:]}")
            check_checkpoints(out)
        code = self.finish(command)
        if code != 0:
            raise Difference(f"the last start failed ({code}): {self.said()[-400:]}")
        check_checkpoints(out)

    def two_at_once(self, model, line, out, secs, kills, figures):
        """A second start is refused while the first lives, and takes over at once when it is killed."""
        command = self.command(model, line, out)
        for _ in range(kills):
            first = self.start(command)
            time.sleep(self.random.uniform(0, secs))
            if first.poll() is None:
                second = subprocess.run(command, cwd=self.place, capture_output=True, text=True)
                # The first may end between the look and the start.
                if first.poll() is None and (second.returncode != 1 or "is in use" not in second.stderr):
                    raise Difference(f"a second start ended with {second.returncode}: {second.stderr[-400:]}")
            if first.poll() is None:
                first.kill()
                figures["kills"] += 1
            first.wait()
            check_checkpoints(out)
        code = self.finish(command)
        if code != 0:
            raise Difference(f"the last start failed ({code}): {self.said()[-400:]}")

    def full_disk(self, model, line, out, figures):
        """A disk of a random size that fills up, then more space."""
        out.mkdir()
        megabytes = self.random.uniform(0.1, 12)
        mount(["-t", "tmpfs", "-o", f"size={int(megabytes * 1024)}k", "none", str(out)])
        try:
            command = self.command(model, line, out)
            code = self.finish(command)
            figures["kills"] += code != 0
            if code not in (0, 1):
                raise Difference(f"a full disk ended it with {code}: {self.said()[-400:]}")
            if code == 1 and "free some space" not in self.said() and "No space left" not in self.said():
                raise Difference(f"the reason is not named: {self.said()[-400:]}")
            check_checkpoints(out)
            left = [name for name in os.listdir(out) if name.startswith("tmp-checkpoint-")]
            if left:
                raise Difference(f"left behind on a full disk: {left}")
            mount(["-o", "remount,size=256m", str(out)])
            code = self.finish(command)
            if code != 0:
                raise Difference(f"with more space it failed ({code}): {self.said()[-400:]}")
            copy = out.with_name(out.name + "-copy")
            shutil.copytree(out, copy)
            return copy
        finally:
            subprocess.run(["umount", str(out)], check=True)


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
    drop = ("time/", "memory/", "step_time", "data/ahead_time")
    same_rows(whole / "metrics.jsonl", cut / "metrics.jsonl", drop)
    same_rows(whole / "skipped.jsonl", cut / "skipped.jsonl", ())
    for folder in ["rollouts", "eval"]:
        names = [sorted(os.listdir(run / folder)) if (run / folder).is_dir() else [] for run in (whole, cut)]
        if names[0] != names[1]:
            raise Difference(f"{folder}: {sorted(set(names[0]) ^ set(names[1]))} in one only")
        for name in names[0]:
            if folder == "eval":
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="kills in all, spread over the cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30, help="steps of each run")
    parser.add_argument("--only", help="only cases whose name holds this text")
    parser.add_argument("--binary", default=str(ROOT / "target/release/omnigrpo"))
    parser.add_argument("--keep", action="store_true", help="keep the directories of sequences that differed")
    args = parser.parse_args()
    args.binary = str(Path(args.binary).resolve())
    place = Path(tempfile.mkdtemp(prefix="omnigrpo-kills-"))
    bench = Bench(args, place)
    cases = [(name, model, line, "kill") for name, model, line in CASES]
    cases += [("two starts at once", F32, TRAIN, "twice"), ("full disk", F32, TRAIN + EVAL, "full")]
    cases = [case for case in cases if args.only is None or args.only in case[0]]
    table, failures = [], []
    for number, (name, model, line, kind) in enumerate(cases):
        share = args.kills * (number + 1) // len(cases) - args.kills * number // len(cases)
        if share == 0:
            continue
        whole = place / f"whole-{number}"
        secs = bench.whole(model, line, whole)
        figures = {"sequences": 0, "equal": 0, "kills": 0, "saving": 0, "signals": 0}
        skipped = ""
        # Some starts are over before their kill; a bound keeps a case from going on for ever.
        while figures["kills"] < share and figures["sequences"] < 3 * share + 3:
            cut = place / f"cut-{number}-{figures['sequences']}"
            kills = min(bench.random.randint(1, 8), share - figures["kills"])
            figures["sequences"] += 1
            try:
                if kind == "full":
                    compare(whole, bench.full_disk(model, line, cut, figures), False)
                elif kind == "twice":
                    bench.two_at_once(model, line, cut, secs, kills, figures)
                    compare(whole, cut, False)
                else:
                    bench.sequence(model, line, cut, secs, kills, figures)
                    compare(whole, cut, "limit" in line or "best" in line)
                figures["equal"] += 1
            except PermissionError as error:
                skipped = f"skipped: {error}"
                break
            except Difference as difference:
                failures.append(f"{name}, sequence {figures['sequences']}: {difference}")
                print(failures[-1], file=sys.stderr, flush=True)
                if args.keep:
                    continue
            for path in [cut, cut.with_name(cut.name + "-copy")]:
                shutil.rmtree(path, ignore_errors=True)
        table.append((name, figures, secs, skipped))
        print(f"{name}: {figures['kills']} kills, {figures['equal']} of {figures['sequences']} equal", flush=True)
    print(f"\n{'case':<24}{'sequences':>10}{'equal':>7}{'ends':>6}{'of these saving':>17}{'by signal':>11}{'s a run':>9}")
    for name, f, secs, skipped in table:
        counts = f"{f['sequences']:>10}{f['equal']:>7}{f['kills']:>6}{f['saving']:>17}{f['signals']:>11}{secs:>9.1f}"
        print(f"{name:<24}{skipped or counts}")
    totals = {key: sum(f[key] for _, f, _, skipped in table if not skipped) for key in ("sequences", "equal", "kills")}
    print(f"{totals['kills']} ends in {totals['sequences']} sequences, {totals['equal']} came out equal")
    if args.keep and failures:
        print(f"kept in {place}")
    else:
        shutil.rmtree(place, ignore_errors=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
