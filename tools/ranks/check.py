#!/usr/bin/env python3
"""Trains the demo's model on one process and on two ranks of Open MPI and of MPICH, and compares the results byte by byte.

    tools/ranks/check.py target/debug/omnigrpo

Then it kills one of two ranks, checks that both end and that the checkpoint is complete, and resumes on one process. Every command
has a time limit.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT_SECS = 600
STEPS = 3
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
OPEN_MPI = ["mpirun.openmpi", "--bind-to", "none", "--oversubscribe", "-n", "2"]
MPICH = ["mpirun.mpich", "-n", "2"]


def main():
    program = str(Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as scratch:
        check(program, Path(scratch))


def check(program, scratch):
    demo = scratch / "demo"
    done([program, "demo", "--max_steps", "1", "--num_generations", "2", "--output_dir", demo])

    def train(out, batches, steps=STEPS):
        return [
            program, "train", "--model_name_or_path", demo / "start-model", "--train_file", demo / "data/train.jsonl",
            "--output_dir", scratch / out, "--max_steps", steps, "--num_generations", 4, "--max_completion_length", 8,
            "--per_device_train_batch_size", 1, "--gradient_accumulation_steps", batches, "--learning_rate", 1e-4,
            "--gradient_leaves", 2, "--save_steps", 1, "--threads", 1,
        ]  # fmt: skip

    alone = done(train("alone", 4))
    expect("a step takes 4 prompts of 4 completions\n" in alone, alone)
    for name, launcher in [("open-mpi", OPEN_MPI), ("mpich", MPICH)]:
        said = done([*launcher, *train(name, 2)])
        expect("a step takes 4 prompts of 4 completions, on 2 ranks" in said, said)
        same(scratch / "alone", scratch / name)
    done([*train("parent", 2), "--nproc_per_node", "2"])
    same(scratch / "alone", scratch / "parent")
    torch(train("torch", 2))
    same(scratch / "alone", scratch / "torch")

    # Two ranks, of which the second is killed after the first checkpoint.
    for name, launcher in [("open-mpi", OPEN_MPI), ("mpich", MPICH)]:
        out = scratch / f"killed-{name}"
        killed(launcher, train(out.name, 2, steps=50), out)
        newest = max(int(path.name.split("-")[1]) for path in out.glob("checkpoint-*"))
        sums = subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=out / f"checkpoint-{newest}")
        expect(sums.returncode == 0, f"checkpoint-{newest} of {out.name} is damaged")
        said = done(train(out.name, 4, steps=newest + 1))
        expect(f"at step {newest} of {newest + 1}" in said, said)
    print("ranks: equal bytes on one process, Open MPI, MPICH, --nproc_per_node and torchrun's variables; kills lose nothing")


def expect(condition, what):
    if not condition:
        sys.exit(f"tools/ranks/check.py: unexpected: {what}")


def done(command):
    """Runs a command that must succeed, and returns what it writes."""
    command = [str(word) for word in command]
    run = subprocess.run(command, env={**os.environ, **ROOT}, capture_output=True, text=True, timeout=LIMIT_SECS)
    expect(run.returncode == 0, f"{' '.join(command)}: status {run.returncode}\n{run.stdout}{run.stderr}")
    return run.stdout + run.stderr


def same(one, other):
    """Compares the model and the optimizer's state of two runs."""
    for name in ["model.safetensors", f"checkpoint-{STEPS}/optimizer.safetensors"]:
        expect((one / name).read_bytes() == (other / name).read_bytes(), f"{name} of {one.name} and {other.name} differ")


def torch(command):
    """Starts two processes with the variables of torchrun."""
    command = [str(word) for word in command]
    started = []
    for rank in range(2):
        own = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        environment = {**os.environ, **ROOT, **own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    for process in started:
        status = process.wait(LIMIT_SECS)
        expect(status == 0, f"a process of torchrun ended with status {status}")


def killed(launcher, command, out):
    """Kills a rank of a run after its first checkpoint, and waits until all ranks have ended."""
    command = [str(word) for word in [*launcher, *command]]
    with open(out.with_suffix(".txt"), "w+") as said:
        run = subprocess.Popen(command, env={**os.environ, **ROOT}, stdout=said, stderr=said)
        until = time.monotonic() + LIMIT_SECS
        while not (out / "checkpoint-1").exists():
            expect(run.poll() is None and time.monotonic() < until, f"{' '.join(command)} has written no checkpoint")
            time.sleep(0.05)
        ranks = processes(str(out))
        expect(len(ranks) >= 2, f"{ranks} are the processes of the run")
        os.kill(max(ranks), signal.SIGKILL)
        status = run.wait(30)
        expect(status != 0, "the launcher ended with status 0 although a rank was killed")
    until = time.monotonic() + 30
    while processes(str(out)):
        expect(time.monotonic() < until, f"processes {processes(str(out))} outlive the run")
        time.sleep(0.05)


def processes(out):
    """Returns the processes of `omnigrpo train` on a run directory, without their launcher."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            state = (path.parent / "stat").read_text().rsplit(") ", 1)[1][0]
        except OSError:
            continue
        if len(words) > 1 and words[1] == b"train" and out.encode() in words and state not in "ZX":
            found.append(int(path.parent.name))
    return found


main()
