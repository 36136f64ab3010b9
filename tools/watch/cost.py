#!/usr/bin/env python3
"""What it costs to be watched: steps of the demo with everything on against the same with everything off.

    python3 tools/watch/cost.py target/release/omnigrpo
    python3 tools/watch/cost.py target/release/omnigrpo --steps 200 --pairs 5 --python PYTHON_WITH_WANDB

On are TensorBoard, Prometheus (scraped every second), W&B offline where its package is installed, numbers per token, and the page
with somebody who listens and fetches what is new. Runs alternate. For each the program's CPU time (user and system) and the wall
time of a step are taken between the fifth step and the last, so starting is left out; the processor of a process does not see what
else the machine does, its clock does. Pairs differ by more than the cost, so the parts are measured by themselves too: CPU time of
the threads of trackers and page and of W&B's own processes, as shares of a step's CPU time, and `time/records`, the seconds of a step
in which logs are written, as a share of the step's. Only Linux and Python's standard library are needed.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TICKS = os.sysconf("SC_CLK_TCK")
FIRST = 5
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Threads of the page and of trackers, by the beginning of their names.
WATCHERS = ("watch", "tracker-", "prometheus")


def rows(run):
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [row for row in map(json.loads, lines) if "step_time" in row]


def stat(path):
    """Name and CPU seconds of a process or thread, and those of its children that have ended."""
    text = Path(path).read_text()
    name = text[text.index("(") + 1 : text.rindex(")")]
    fields = text[text.rindex(")") + 2 :].split()
    return name, (int(fields[11]) + int(fields[12])) / TICKS, int(fields[1])


def threads(pid):
    """Names and CPU seconds of a process's threads."""
    found = {}
    for task in map(int, os.listdir(f"/proc/{pid}/task")):
        try:
            name = Path(f"/proc/{pid}/task/{task}/comm").read_text().strip()
            found[task] = name, int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def descendants(pid):
    """CPU seconds of the processes below one."""
    parents, seconds = {}, {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            _, seconds[int(entry)], parents[int(entry)] = stat(f"/proc/{entry}/stat")
        except (FileNotFoundError, ProcessLookupError):
            continue

    def below(one):
        while one in parents:
            one = parents[one]
            if one == pid:
                return True
        return False

    return sum(own for one, own in seconds.items() if below(one))


def look(pid):
    own = threads(pid)
    main = own.pop(pid)
    watching = sum(ran for name, ran in own.values() if name.startswith(WATCHERS))
    return {"cpu": stat(f"/proc/{pid}/stat")[1], "main": main[1], "watching": watching, "wandb": descendants(pid), "wall": time.monotonic()}


def listen(url, over):
    """What the page does: hears of news and fetches them."""
    have = 0
    with DIRECT.open(url + "api/events") as events:
        for line in events:
            if over.is_set():
                return
            if line.startswith(b"data: "):
                told = json.loads(line[6:])[0]["bytes"]
                while have < told:
                    answer = DIRECT.open(f"{url}api/metrics?run=0&from={have}")
                    have = int(answer.headers["x-next"])
                    answer.read()


def scrape(port, over):
    while not over.wait(1):
        try:
            DIRECT.open(f"http://127.0.0.1:{port}/metrics").read()
        except OSError:
            pass


def train(args, place, on):
    out = place / "run"
    shutil.rmtree(out, ignore_errors=True)
    words = [
        args.binary, "train", "--config", ROOT / "examples/demo/train.yaml", "--model_name_or_path", place / "base/start-model",
        "--train_file", place / "base/data/train.jsonl", "--eval_file", place / "few.jsonl", "--output_dir", out,
        "--max_steps", args.steps, "--logging_steps", args.logging_steps, "--skip_data_check",
    ]  # fmt: skip
    env = os.environ | {"WANDB_MODE": "offline", "NO_COLOR": "1"}
    if on:
        to = ["tensorboard", "prometheus"] + (["wandb"] if args.python else [])
        words += ["--report_to", *to, "--prometheus_port", 0, "--log_token_stats", "--dashboard"]
        words += ["--reward_python", args.python] if args.python else []
    over, said = threading.Event(), []
    process = subprocess.Popen([str(word) for word in words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)

    def follow():
        for line in process.stderr:
            said.append(line)
            page = re.search(r"http://127\.0\.0\.1:\d+/[0-9a-f]{32}/", line)
            port = re.search(r"for Prometheus: http://127\.0\.0\.1:(\d+)/", line)
            if page:
                threading.Thread(target=listen, args=(page[0], over), daemon=True).start()
            if port:
                threading.Thread(target=scrape, args=(int(port[1]), over), daemon=True).start()

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    begun = None
    while process.poll() is None:
        time.sleep(0.02)
        done = len(rows(out)) if begun is None or begun["wall"] + 1 < time.monotonic() else 0
        if begun is None and done >= FIRST:
            begun = look(process.pid) | {"step": done}
        # The step after the first look; the run still lives at its last but one.
        if done >= args.steps - 1:
            ended = look(process.pid) | {"step": done}
            break
    over.set()
    if process.wait() != 0 or begun is None:
        sys.exit(f"the run failed: {''.join(said)[-2000:]}")
    reader.join(5)
    steps = ended["step"] - begun["step"]
    per_step = {name: (ended[name] - begun[name]) / steps for name in ("cpu", "main", "watching", "wandb", "wall")}
    taken = rows(out)[FIRST : args.steps - 1]
    per_step["step"] = statistics.median(row["step_time"] for row in taken)
    per_step["records"] = statistics.median(row["time/records"] for row in taken)
    per_step["share"] = statistics.median(row["time/records"] / row["step_time"] for row in taken)
    per_step["tokens"] = sum(path.stat().st_size for path in (out / "tokens").glob("*")) / args.steps if on else 0
    return per_step


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("binary", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--logging_steps", type=int, default=50, help="as the demo has it")
    parser.add_argument("--python", help="a Python that has wandb")
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="omnigrpo-cost-"))
    try:
        demo = [args.binary, "demo", "--max_steps", "1", "--output_dir", place / "base"]
        subprocess.run(demo, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        few = (place / "base/data/eval.jsonl").read_text().splitlines(keepends=True)[:16]
        (place / "few.jsonl").write_text("".join(few).replace('"media/', f'"{place}/base/data/media/'))
        found = {True: [], False: []}
        for pair in range(args.pairs):
            for on in (False, True) if pair % 2 == 0 else (True, False):
                found[on].append(train(args, place, on))
                told = " ".join(f"{name} {value * 1e3:.2f}" for name, value in found[on][-1].items() if name not in ("tokens", "share"))
                print(f"{'on ' if on else 'off'} ms/step: {told}", flush=True)
        mean = {on: {name: statistics.mean(one[name] for one in found[on]) for name in found[on][0]} for on in found}
        off, on = mean[False], mean[True]
        print(f"CPU time of a step, on : off = {on['cpu'] / off['cpu']:.4f}, wall time {on['step'] / off['step']:.4f}")
        share = lambda name: f"{on[name] * 1e3:.3f} ms, {100 * on[name] / off['cpu']:.2f} % of a step's CPU time"
        print(f"threads of trackers and page: {share('watching')}")
        print(f"logs: {on['records'] * 1e3:.3f} ms, {100 * on['share']:.2f} % of a step's time; without numbers per token "
              f"{off['records'] * 1e3:.3f} ms, {100 * off['share']:.2f} %; these are {on['tokens'] / 1e3:.0f} kB a step")
        print(f"together {100 * (on['share'] + on['watching'] / off['cpu']):.2f} %")
        if args.python:
            print(f"processes of W&B beside the run: {share('wandb')}")
    finally:
        shutil.rmtree(place, ignore_errors=True)


main()
