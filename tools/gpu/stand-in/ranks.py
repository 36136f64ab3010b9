#!/usr/bin/env python3
"""Trains on two ranks with a card each, on the stand-ins of the driver and of NCCL, and compares the results with one process.

    tools/gpu/stand-in/ranks.py PROGRAM FOLDER

FOLDER is new and receives everything that the commands write. LD_LIBRARY_PATH has to name the stand-ins and NVRTC (see `check`), and
PATH an `mpirun`. Different bytes, a complaint of the stand-in, or an error that does not say what is wrong is a failure.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

from verbs import GOLDEN, ROWS, UPDATE, Failure

STEPS = 2
LIMIT_SECS = 600
# Longest time from the loss of a rank to the end of the run.
TO_END_SECS = 30
TRAIN = (
    f"train --model {GOLDEN}/checkpoints/qwen2_5_vl_tied {UPDATE} --threads 1 --train_file rows.jsonl --reward_funcs random "
    "--num_generations 4 --max_completion_length 8 --min_completion_length 8 --gradient_leaves 2 --save_steps 1"
)
MPIRUN = [shutil.which("mpirun.openmpi") or "mpirun", "--bind-to", "none", "--oversubscribe", "-n", "2"]
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
CARDS = {"STAND_IN_DEVICES": "2"}


class Run:
    """A run of the program on one rank or two, whose output goes to a file."""

    def __init__(self, program, place, name, ranks, words="", **environment):
        self.place, self.name, self.ranks = place, name, ranks
        self.reports = place / f"reports-{name}"
        self.reports.mkdir()
        # Two prompts a step.
        batch = f"--gradient_accumulation_steps {2 // ranks} --output_dir {name}"
        self.words = [*(MPIRUN if ranks == 2 else []), program, *f"{TRAIN} {batch} {words}".split()]
        for setting, value in [("--device", "cuda:0"), ("--torch_dtype", "float32"), ("--max_steps", str(STEPS))]:
            if setting not in self.words:
                self.words += [setting, value]
        own = {"STAND_IN_REPORT": str(self.reports), "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(place / "cache")}
        with open(place / f"{name}.txt", "w") as out:
            variables = {**os.environ, **ROOT, **own, **environment}
            self.process = subprocess.Popen(self.words, cwd=place, env=variables, stdout=out, stderr=out)

    def said(self):
        return (self.place / f"{self.name}.txt").read_text()

    def end(self, code=0, within=LIMIT_SECS):
        """Waits for the end, and returns the reports of the stand-in."""
        try:
            ended = self.process.wait(within)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise Failure(f"{self.name} does not end within {within} s:\n{self.said()}") from None
        if (ended == 0) != (code == 0):
            raise Failure(f"exit code {ended} of {' '.join(map(str, self.words))}\n{self.said()}")
        reports = [json.loads(path.read_text()) for path in self.reports.iterdir()]
        complaints = [complaint for report in reports for complaint in report["complaints"]]
        if complaints:
            raise Failure("the stand-in complains:\n" + "\n".join(complaints))
        return reports

    def says(self, *parts):
        for part in parts:
            if self.said().count(part) != 1:
                raise Failure(f"`{part}` is {self.said().count(part)} times in the output of {self.name}, expected once:\n{self.said()}")

    def files(self):
        names = ["model.safetensors", f"checkpoint-{STEPS}/optimizer.safetensors"]
        return [(self.place / self.name / name).read_bytes() for name in names]


def exchanged(reports):
    return sum(report.get("exchanged_bytes", 0) for report in reports)


def equal(run, one, exchanges=True):
    """Compares a run on two ranks with one process byte by byte."""
    reports = run.end()
    if len(reports) != 2:
        raise Failure(f"{len(reports)} processes used the stand-in, expected 2")
    if run.files() != one.files():
        raise Failure(f"{run.name} and {one.name} have different weights or another state")
    if (exchanged(reports) > 0) != exchanges:
        raise Failure(f"{run.name} sent {exchanged(reports)} bytes over NCCL")
    return f"equal bytes; {exchanged(reports) / 1e6:.2f} MB over NCCL"


def cases(start, place):
    """Yields each case: its name and the function that runs it."""
    one = start("one", 1)
    one.end()

    def plain():
        run = start("two", 2, **CARDS)
        said = equal(run, one)
        run.says("gradients: summed on the GPUs, over NCCL 2.28\n")
        return said

    yield "two cards", plain
    yield "two cards, small pieces", lambda: equal(start("pieces", 2, "--reduce_bucket_size 5000", **CARDS), one)

    def bf16():
        words = "--torch_dtype bfloat16"
        in_bf16 = start("one-bf16", 1, words)
        in_bf16.end()
        return equal(start("two-bf16", 2, words, **CARDS), in_bf16)

    yield "two cards, bf16", bf16

    def cut():
        words = "--shard optimizer"
        in_main_memory = start("cut-mpi", 2, f"{words} --ddp_backend mpi", **CARDS)
        in_main_memory.end()
        return equal(start("cut", 2, words, **CARDS), in_main_memory)

    yield "two cards, a cut state", cut
    yield "two cards over MPI", lambda: equal(start("mpi", 2, "--ddp_backend mpi", **CARDS), one, exchanges=False)

    def engine():
        run = start("engine", 2, "--gradient_sum engine", **CARDS)
        sent = exchanged(run.end())
        if not sent:
            raise Failure("nothing was sent over NCCL")
        return f"{sent / 1e6:.2f} MB over NCCL"

    yield "the sum of NCCL", engine

    def refused(name, *parts, words="", **environment):
        run = start(name, 2, words, **{**CARDS, **environment})
        run.end(code=1)
        run.says(*parts)
        return f"says {', '.join(parts)}"

    without = place / "without"
    without.mkdir()
    for folder in os.environ["LD_LIBRARY_PATH"].split(":"):
        for library in pathlib.Path(folder).glob("lib*.so*"):
            if not library.name.startswith("libnccl"):
                (without / library.name).symlink_to(library)
    missing = ["libnccl was not found; install it with `pip install 'nvidia-nccl-cu13'`", "`--ddp_backend mpi` sums gradients in main memory"]
    yield "no NCCL", lambda: refused("missing", *missing, LD_LIBRARY_PATH=str(without))
    yield "an old NCCL", lambda: refused("old", "is version 2.17, expected 2.18 or newer", STAND_IN_NCCL="21705")
    yield "one card for two ranks", lambda: refused("shared", "ranks 0 and 1 use the same GPU", STAND_IN_DEVICES="1")
    yield "NCCL on CPUs", lambda: refused("cpus", "NCCL connects GPUs only", words="--ddp_backend nccl --device cpu")
    yield "a lost connection", lambda: refused("lost", "unhandled system error", STAND_IN_NCCL_FAULT="3")

    def killed():
        run = start("killed", 2, "--max_steps 1000", **CARDS)
        checkpoint, until = place / "killed/checkpoint-1", time.monotonic() + LIMIT_SECS
        while not checkpoint.exists():
            if run.process.poll() is not None or time.monotonic() > until:
                raise Failure(f"there is no checkpoint:\n{run.said()}")
            time.sleep(0.05)
        ranks = children(run.process.pid)
        os.kill(max(ranks), signal.SIGKILL)
        started = time.monotonic()
        run.end(code=1, within=TO_END_SECS)
        took = time.monotonic() - started
        if f"(process {max(ranks)}) has ended" not in run.said():
            raise Failure(f"the survivor does not name process {max(ranks)}:\n{run.said()}")
        sums = subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=checkpoint, check=False)
        if sums.returncode:
            raise Failure("checkpoint-1 is damaged")
        return f"ended after {took:.1f} s, and the survivor names the rank"

    yield "a killed rank", killed


def children(parent):
    """Returns the processes that a process has started."""
    tasks = pathlib.Path(f"/proc/{parent}/task").glob("*/children")
    return [int(child) for path in tasks for child in path.read_text().split()]


def main():
    program, place = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    place.mkdir(parents=True)
    shutil.copy(GOLDEN / "media/shapes.png", place)
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def start(name, ranks, words="", **environment):
        return Run(program, place, name, ranks, words, **environment)

    name = "one card"
    try:
        for name, case in cases(start, place):
            print(f"{name}: {case()}", flush=True)
    except Failure as failure:
        sys.exit(f"{name}: {failure}")


if __name__ == "__main__":
    main()
