#!/usr/bin/env python3
"""Compares the files of this folder with the program: its settings, the metrics that a run serves, and the form of the rules.

    python3 examples/cluster/check.py target/debug/omnigrpo
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEY = "0123456789abcdef0123"
# Served only by runs with a reference.
ONLY_SOMETIMES = {"kl"}


def settings(program):
    """Names of all settings, as JSON Schema."""
    schema = json.loads(subprocess.run([program, "schema"], check=True, capture_output=True, text=True).stdout)
    return set(schema["properties"])


def used():
    words = (HERE / "train.sbatch").read_text().split("omnigrpo train", 1)[1] + (HERE / "pod.yml").read_text()
    return set(re.findall(r"(?<![\w-])--([a-z_]+)(?=[ =\n])", words)) - {"target"}


def named():
    text = (HERE / "alerts.yml").read_text() + (HERE / "board.json").read_text().replace('\\"', '"')
    return set(re.findall(r'metric="([^"]+)"', text))


def served(program):
    """Names of the metrics that a short run with an evaluation serves to another machine."""
    with tempfile.TemporaryDirectory() as place:
        place, names = Path(place), set()
        subprocess.run([program, "demo", "--output_dir", place / "demo", "--max_steps", "1"], check=True, capture_output=True)
        data = place / "demo/data"
        command = [
            program, "train", "--model_name_or_path", place / "demo", "--train_file", data / "train.jsonl", "--eval_file", data / "eval.jsonl",
            "--output_dir", place / "run", "--reward_funcs", "accuracy", "--max_steps", "40", "--eval_on_start", "true", "--eval_strategy", "no",
            "--report_to", "prometheus", "--host", "0.0.0.0", "--prometheus_port", "0", "--save_strategy", "no", "--num_generations", "2",
        ]
        environment = dict(os.environ, OMNIGRPO_API_KEY=KEY)
        run = subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        address = None
        try:
            for line in run.stderr:
                address = address or re.search(r"for Prometheus: http://[^/]*:(\d+)/metrics", line)
                if not address:
                    continue
                request = urllib.request.Request(f"http://127.0.0.1:{address[1]}/metrics", headers={"Authorization": f"Bearer {KEY}"})
                try:
                    names |= set(re.findall(r'metric="([^"]+)"', urllib.request.urlopen(request, timeout=5).read().decode()))
                except (urllib.error.URLError, ConnectionError):
                    pass
                if named() - ONLY_SOMETIMES <= names:
                    break
                time.sleep(0.05)
        finally:
            run.kill()
            run.wait()
        assert address, "the run named no address for Prometheus"
        return names


def main():
    program = str(Path(sys.argv[1]).resolve())
    problems = [f"unknown setting --{name}" for name in sorted(used() - settings(program))]
    assert len(used()) > 10 and len(named()) > 10, (used(), named())
    problems += [f"no run serves the metric {name}" for name in sorted(named() - served(program) - ONLY_SOMETIMES)]
    problems += [problem.strip() for problem in [subprocess.run(["bash", "-n", HERE / "train.sbatch"], capture_output=True, text=True).stderr] if problem]
    if shutil.which("promtool"):
        for kind, file in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
            # A file that the configuration names need not exist for its syntax.
            options = ["--syntax-only"] if kind == "config" else []
            done = subprocess.run(["promtool", "check", kind, *options, HERE / file], capture_output=True, text=True)
            problems += [f"{file}: {done.stdout}{done.stderr}"] if done.returncode else []
    else:
        print("promtool is not installed, so the rules were not checked")
    print("\n".join(problems) or f"{len(used())} settings and {len(named())} metrics are known")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
