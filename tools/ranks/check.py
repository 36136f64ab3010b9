#!/usr/bin/env python3
"""Trains the demo's model on one process and on two ranks of Open MPI and of MPICH, and compares the results byte by byte.

    tools/ranks/check.py target/debug/omnigrpo [--kills N]

Ranks that differ in a setting or a file must not start, and settings of a single rank must not matter. Then it kills and stops ranks,
launchers and the processes that wait for them, checks that all others end and that the checkpoint is complete, and resumes on one process.
Errors of a rank must be one message and one exit status. Every command has a time limit. With `--kills N`, it only kills a rank N times, at random moments of a run that it starts again each time,
and compares the finished run with an uninterrupted one.
"""

import array
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

LIMIT_SECS = 600
STEPS = 3
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# Models of rewards in the published layout, a small one and one with a tensor of 40 kB.
JUDGES = Path(__file__).resolve().parents[2] / "crates/scorers/tests/golden/reward_models"
JUDGE = JUDGES / "bert"
OPEN_MPI = ["mpirun.openmpi", "--bind-to", "none", "--oversubscribe", "-n", "2"]
MPICH = ["mpirun.mpich", "-n", "2"]
SHARDS = ["optimizer", "gradients", "weights"]
# Cuts the weights of the demo's model, which are smaller than the default.
ALL = ["--shard_min_elements", "0"]


def main():
    program = str(Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as scratch:
        train = trainer(program, Path(scratch))
        if sys.argv[2:3] == ["--kills"]:
            kills(train, Path(scratch), int(sys.argv[3]))
        else:
            check(train, Path(scratch))


def trainer(program, scratch):
    """Writes the demo's model and returns a function that makes the command of a run."""
    demo = scratch / "demo"
    done([program, "demo", "--max_steps", "1", "--num_generations", "2", "--output_dir", demo])

    def train(out, batches, steps=STEPS, more=(), longest=8, leaves=2):
        more = [*more, *(["--gradient_leaves", leaves] if leaves else [])]
        return [
            program, "train", "--model_name_or_path", demo / "start-model", "--train_file", demo / "data/train.jsonl",
            "--output_dir", scratch / out, "--max_steps", steps, "--num_generations", 4, "--max_completion_length", longest,
            "--per_device_train_batch_size", 1, "--gradient_accumulation_steps", batches, "--learning_rate", 1e-4,
            "--save_steps", 1, "--threads", 1, *more,
        ]  # fmt: skip

    return train


def check(train, scratch):
    alone = done(train("alone", 4))
    expect("a step takes 4 prompts of 4 completions:" in alone, alone)
    for name, launcher in [("open-mpi", OPEN_MPI), ("mpich", MPICH)]:
        said = done([*launcher, *train(name, 2)])
        expect("a step takes 4 prompts of 4 completions, on 2 ranks" in said, said)
        same(scratch / "alone", scratch / name)
        for shard in SHARDS:
            cut = ["--shard", shard, "--reduce_bucket_size", "100000", *(ALL if shard == "weights" else [])]
            done([*launcher, *train(f"{name}-{shard}", 2, more=cut)])
            same(scratch / "alone", scratch / f"{name}-{shard}")
    adapters(train, scratch)
    differ(train, scratch)
    done([*train("parent", 2), "--nproc_per_node", "2"])
    same(scratch / "alone", scratch / "parent")
    torch(train("torch", 2))
    same(scratch / "alone", scratch / "torch")
    turns(train, scratch)
    supervised(train, scratch)
    rows_of_files(train, scratch)
    judged = ["--reward_funcs", f"judge={JUDGE}"]
    done(train("judged", 4, more=judged))
    done([*OPEN_MPI, *train("judged-2", 2, more=judged)])
    same(scratch / "judged", scratch / "judged-2")

    # Four ranks, and three, whose sums are those of three leaves.
    done(train("three", 3, leaves=3))
    done(train("four", 4, leaves=4))
    for name, launcher in [("open-mpi", OPEN_MPI), ("mpich", MPICH)]:
        for word, size in [("three", 3), ("four", 4)]:
            done([*launcher[:-1], str(size), *train(f"{word}-{name}", 1, leaves=size)])
            same(scratch / word, scratch / f"{word}-{name}")

    # A run of two ranks has two leaves, also when one process resumes it.
    done([*OPEN_MPI, *train("default", 2, leaves=None)])
    done(train("default", 4, steps=STEPS + 1, leaves=None))
    done(train("alone", 4, steps=STEPS + 1))
    same(scratch / "alone", scratch / "default")

    # Two ranks, of which the second is killed after the first checkpoint.
    for name, launcher in [("open-mpi", OPEN_MPI), ("mpich", MPICH)]:
        out = scratch / f"killed-{name}"
        killed(launcher, train(out.name, 2, steps=50), out)
        step = newest(out)
        sums = subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=out / f"checkpoint-{step}")
        expect(sums.returncode == 0, f"checkpoint-{step} of {out.name} is damaged")
        for steps, command in [
            (step + 1, [*launcher, *train(out.name, 2, steps=step + 1)]),
            (step + 2, train(out.name, 4, steps=step + 2)),
        ]:
            said = done(command)
            expect(f"at step {steps - 1} of {steps}" in said, said)
        stopped(launcher, train, scratch / f"stopped-{name}")
        lost(name, launcher, train, scratch)
        frozen(launcher, train(f"frozen-{name}", 2, steps=1000), scratch / f"frozen-{name}", 20)
        errors(name, launcher, train, scratch)
    patient = train("frozen-longer", 2, steps=1000, more=["--ddp_timeout", 26])
    frozen(OPEN_MPI, patient, scratch / "frozen-longer", 26)
    impatient(train("impatient", 2, steps=1000), scratch / "impatient")
    hung_up(train, scratch / "hung-up")
    print("ranks: equal bytes on one process, Open MPI, MPICH, --nproc_per_node and torchrun's variables; kills lose nothing")


def adapters(train, scratch):
    """Trains adapters in f32, over a base in a file that the ranks share or over a base that is cut, and in bf16."""
    for dtype in ["float32", "bfloat16"]:
        more = ["--use_peft", "--lora_r", 4, "--torch_dtype", dtype, "--beta", 0.04]
        done(train(f"alone-{dtype}", 4, more=more))
        for shard in ["none", "weights"]:
            cut = ["--shard", shard, *(ALL if shard == "weights" else [])]
            for name, launcher in [("open-mpi", OPEN_MPI), ("mpich", MPICH)]:
                out = f"{dtype}-{shard}-{name}"
                done([*launcher, *train(out, 2, more=[*more, *cut])])
                same(scratch / f"alone-{dtype}", scratch / out, "adapter_model.safetensors")


def few_rows(scratch, count, name="few.jsonl"):
    """Writes the first rows of the demo, and returns their file."""
    rows = (scratch / "demo/data/train.jsonl").read_text().splitlines(keepends=True)
    file = scratch / "demo/data" / name
    file.write_text("".join(rows[:count]))
    return file


def supervised(train, scratch):
    """Trains on answers in one process and on two and three ranks, and resumes with another number."""

    def sft(out, batches, steps=STEPS, leaves=2, more=()):
        return [
            train("", 1)[0], "sft", "--model_name_or_path", scratch / "demo/start-model", "--train_file", few_rows(scratch, 40),
            "--output_dir", scratch / out, "--max_steps", steps, "--per_device_train_batch_size", 1,
            "--gradient_accumulation_steps", batches, "--learning_rate", 1e-4, "--save_steps", 1, "--threads", 1,
            "--gradient_leaves", leaves, *more,
        ]  # fmt: skip

    for leaves, shards in [(2, ["none", *SHARDS]), (3, ["none"])]:
        alone = scratch / f"sft-{leaves}"
        said = done(sft(alone.name, 6, leaves=leaves))
        expect("a step takes 6 answers" in said, said)
        for name, launcher in [("open-mpi", OPEN_MPI), ("mpich", MPICH)]:
            for shard in shards:
                cut = ["--shard", shard, *(ALL if shard == "weights" else [])]
                out = f"{alone.name}-{shard}-{name}"
                said = done([*launcher[:-1], leaves, *sft(out, 6 // leaves, leaves=leaves, more=cut)])
                expect(f"a step takes 6 answers, on {leaves} ranks" in said, said)
                same(alone, scratch / out)
    done([*sft("sft-parent", 3), "--nproc_per_node", "2"])
    same(scratch / "sft-2", scratch / "sft-parent")
    torch(sft("sft-torch", 3))
    same(scratch / "sft-2", scratch / "sft-torch")
    done(sft("sft-2", 6, steps=STEPS + 1))
    done([*OPEN_MPI, *sft("sft-parent", 3, steps=STEPS + 1)])
    for file in ["model.safetensors", f"checkpoint-{STEPS + 1}/optimizer.safetensors"]:
        equal = (scratch / "sft-2" / file).read_bytes() == (scratch / "sft-parent" / file).read_bytes()
        expect(equal, f"{file} of supervised runs that resumed in one and in two processes differ")


def rows_of_files(train, scratch):
    """Evaluates a model and samples completions in one process and on two and three ranks, with a row that cannot be read."""
    demo, rows = scratch / "demo", few_rows(scratch, 21)
    broken = {**json.loads(rows.read_text().splitlines()[0]), "id": "broken", "image": "no such.png"}
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join([*lines[:5], json.dumps(broken) + "\n", *lines[5:]]))
    names = ["--model_name_or_path", demo / "start-model", "--max_completion_length", 12, "--threads", 1, "--batch_size", 2]

    def read(verb, out, more=()):
        input = ["--eval_file", rows, "--max_skipped", 0.1] if verb == "eval" else ["--input", rows]
        return [train("", 1)[0], verb, *names, *input, "--num_generations", 2, "--temperature", 1, "--output", scratch / out, *more]

    def run(command, status):
        command = [str(word) for word in command]
        run = subprocess.run(command, env={**os.environ, **ROOT}, capture_output=True, text=True, timeout=LIMIT_SECS)
        expect(run.returncode == status, f"{' '.join(command)}: status {run.returncode}, expected {status}\n{run.stdout}{run.stderr}")
        return run.stdout, run.stderr

    # One row of 22 fails, which `generate` says at its end.
    for verb, status in [("eval", 0), ("generate", 1)]:
        alone, said = run(read(verb, f"{verb}.jsonl"), status)
        files = [f"{verb}.jsonl", f"{verb}.summary.json"] if verb == "eval" else [f"{verb}.jsonl"]
        whole = (scratch / f"{verb}.jsonl").read_text().splitlines()
        expect(len(whole) == (21 if verb == "eval" else 22), f"{verb}: {len(whole)} lines")
        for name, launcher in [("open-mpi", OPEN_MPI), ("mpich", MPICH)]:
            for size in [2, 3]:
                out = f"{verb}-{name}-{size}"
                printed, said = run([*launcher[:-1], size, *read(verb, f"{out}.jsonl")], status)
                expect(printed == alone, f"{out}: {printed}\ninstead of\n{alone}")
                expect(said.count("error: ") == status, f"{out}: {said}")
                for file in files:
                    equal = (scratch / file).read_bytes() == (scratch / file.replace(verb, out, 1)).read_bytes()
                    expect(equal, f"{file} and that of {out} differ")
                expect(not list(scratch.glob(f"{out}*.partial")), f"{out}.jsonl.partial is left")
        # A process that is killed leaves what it has done, and another number of processes goes on.
        out = scratch / f"{verb}-killed.jsonl"
        partial = Path(f"{out}.partial")
        started = subprocess.Popen([str(word) for word in [*OPEN_MPI, *read(verb, out.name, ["--batch_size", 1])]], env={**os.environ, **ROOT},
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        until = time.monotonic() + LIMIT_SECS
        while not partial.exists() or partial.read_text().count("\n") < 3:
            expect(started.poll() is None and time.monotonic() < until, f"{verb} ended before it was killed")
            time.sleep(0.002)
        os.kill(max(processes(str(out), verb)), signal.SIGKILL)
        expect(started.wait(60) != 0, f"{verb} ended with status 0 although a rank was killed")
        all_ended(out, verb=verb)
        done_before = partial.read_text().count("\n") - 1
        printed, said = run([*MPICH[:-1], 3, *read(verb, out.name)], status)
        expect(f"resuming after {done_before} of 22 rows" in said, said)
        expect(printed == alone and out.read_bytes() == (scratch / f"{verb}.jsonl").read_bytes(), f"{verb} resumed to another end")
        expect(either(OPEN_MPI, read(verb, f"{verb}-differs.jsonl"), ["--temperature", 0.5])[0] == 2, f"{verb}: ranks differ unnoticed")
        expect(not (scratch / f"{verb}-differs.jsonl").exists(), f"{verb}: ranks that differ have written rows")
    # One prompt, and commands that are not divided, are refused.
    for refused in [["generate", *names[:2], "--prompt", "Hm?"], ["score", *names[:2], "--input", rows, "--output", scratch / "no.jsonl"]]:
        _, said = run([*OPEN_MPI, train("", 1)[0], *refused], 2)
        expect("one process" in said and not (scratch / "no.jsonl").exists(), said)


# Answers every turn with the medium of the row, if it is a picture, and a word.
LOOK = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    answer = {"id": request["id"]}
    if request.get("probe"):
        answer["answers_text"] = True
    else:
        pictures = [{"type": "image", "image": path} for path in request["media"] if path.endswith(".png")]
        answer["answer"] = [*pictures, {"type": "text", "text": "again"}]
    print(json.dumps(answer), flush=True)
"""


def turns(train, scratch):
    """Compares runs whose completions have turns of an environment."""
    (scratch / "look.py").write_text(LOOK)
    more = ["--environment", f"cmd:{sys.executable} {scratch / 'look.py'}", "--max_turns", 1]
    done(train("turns", 4, more=more, longest=96))
    records = (scratch / "turns/rollouts/step-000001.jsonl").read_text()
    expect('"turns":[{' in records and ".png" in records, f"no answer of the environment in {records[:2000]}")
    for name, launcher in [("open-mpi", OPEN_MPI), ("mpich", MPICH)]:
        done([*launcher, *train(f"turns-{name}", 2, more=more, longest=96)])
        same(scratch / "turns", scratch / f"turns-{name}")


# Runs the first of two commands on rank 0, and the second on all others.
EITHER = """
import json, os, sys
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
command = json.loads(sys.argv[2 if rank != "0" else 1])
os.execv(command[0], command)
"""


def differ(train, scratch):
    """Lets the second rank have another setting or another file. Such a run ends with status 2 on all ranks before its first step, and
    names what differs. Settings of a single rank give the bytes of a run without them."""
    demo, own = scratch / "demo", scratch / "other"
    shutil.copytree(demo / "start-model", own / "start-model")
    shutil.copytree(demo / "data", own / "data")
    rows = (demo / "data/train.jsonl").read_text().splitlines(keepends=True)

    def changed(path, edit):
        """Returns a copy of a file or of the model's directory in which `edit` has changed a file."""
        changed.count += 1
        folder = scratch / f"changed-{changed.count}"
        shutil.copytree(path if path.is_dir() else path.parent, folder / path.name if path.is_dir() else folder)
        to = folder / path.name
        edit(to)
        return to

    def text(name, old, new):
        def edit(model):
            before = (model / name).read_text()
            expect(old in before, f"{name} has no {old}")
            (model / name).write_text(before.replace(old, new, 1))

        return edit

    def byte(model):
        """Changes one bit in the middle of the largest tensor."""
        path = model / "model.safetensors"
        content = bytearray(path.read_bytes())
        length = int.from_bytes(content[:8], "little")
        tensors = json.loads(content[8 : 8 + length])
        tensors.pop("__metadata__", None)
        start, end = max((tensor["data_offsets"] for tensor in tensors.values()), key=lambda span: span[1] - span[0])
        expect(end - start > 3 * 8192, "the largest tensor is smaller than the ends that are hashed before loading")
        content[8 + length + (start + end) // 2 // 4 * 4] ^= 1
        path.write_bytes(content)

    changed.count = 0
    model, train_file = demo / "start-model", demo / "data/train.jsonl"
    media = next(value for value in json.loads(rows[0]).values() if str(value).endswith(".png"))
    media = media[0] if isinstance(media, list) else media
    other_rows = changed(train_file, lambda path: path.write_text("".join([rows[1], *rows[1:]])))
    fewer = changed(train_file, lambda path: path.write_text("".join(rows[:-1])))
    picture = changed(train_file, lambda path: (path.parent / media).write_bytes((path.parent / media).read_bytes() + b"x"))
    lora = ["--use_peft", "--lora_r", 4]
    done(train("adapter", 4, steps=1, more=lora))
    adapter = scratch / "adapter"
    # Each case has settings of both ranks, settings of the second one alone, and a part of the message.
    cases = {
        "seed": ([], ["--seed", 7], "seed: "),
        "rate": ([], ["--learning_rate", 1e-2], "learning_rate: 0.0001 on rank 0, 0.01 on rank 1"),
        "loss": ([], ["--loss_type", "dapo"], "loss_type: "),
        "dtype": ([], ["--torch_dtype", "bfloat16"], "torch_dtype: "),
        "scheduler": ([], ["--lr_scheduler_type", "cosine"], "lr_scheduler_type: "),
        "steps": ([], ["--max_steps", 9], "max_steps: "),
        "shard": ([], ["--shard", "weights"], "shard: "),
        "bucket": ([], ["--reduce_bucket_size", 1000], "reduce_bucket_size: "),
        "generations": ([], ["--num_generations", 2], "num_generations: "),
        "leaves": ([], ["--gradient_leaves", 4], "gradient_leaves: "),
        "batches": ([], ["--gradient_accumulation_steps", 1], "gradient_accumulation_steps: "),
        "saves": ([], ["--save_steps", 2], "save_steps: "),
        "cut rates": (["--shard", "weights"], ["--learning_rate", 1e-2], "learning_rate: "),
        "directory": ([], ["--output_dir", scratch / "elsewhere"], "output_dir: "),
        "rows": ([], ["--train_file", other_rows], "content of training file 1: other content on rank 1"),
        "fewer rows": ([], ["--train_file", fewer], f"training rows: {len(rows)} on rank 0, {len(rows) - 1} on rank 1"),
        "picture": ([], ["--train_file", picture], "media: other content on rank 1"),
        "folder of pictures": (["--image_folders", demo / "data"], ["--image_folders", picture.parent], "media: other content on rank 1"),
        "template": ([], [changed(model, lambda to: template(to))], "of the model: other content on rank 1"),
        "configuration": ([], [changed(model, text("config.json", "{", "{ "))], "config.json of the model: other content on rank 1"),
        "weights": ([], [changed(model, scaled)], "tensor "),
        "one bit": ([], [changed(model, byte)], "differ in their weights"),
        "one bit, shared base": ([*lora, "--beta", 0.04], [changed(model, byte)], "differ in their weights"),
        "one bit, cut weights": (["--shard", "weights", *ALL], [changed(model, byte)], "differ in their weights"),
        "one bit, few bits": ([*lora, "--load_in_8bit"], [changed(model, byte)], "differ in their weights"),
        "one bit, bf16": (["--torch_dtype", "bfloat16"], [changed(model, byte)], "differ in their weights"),
        "adapter": (["--adapter_name_or_path", adapter], ["--adapter_name_or_path", changed(adapter, other_adapter)], "of the adapter"),
    }
    for what, (both, second, message) in cases.items():
        second = ["--model_name_or_path", *second] if len(second) == 1 else second
        for name, launcher in [("open-mpi", OPEN_MPI), ("mpich", MPICH)]:
            # Files need no second launcher.
            if name == "mpich" and not isinstance(second[1], (int, float, str)):
                continue
            out = scratch / f"differ-{what}-{name}"
            code, said = either(launcher, train(out.name, 2, more=both), second)
            expect(code == 2, f"{what} under {name}: status {code}\n{said}")
            expect(message in said and said.count("error: ") == 1, f"{what} under {name}: expected one message with {message}\n{said}")
            expect("rank 1 and rank 0 differ in " in said, f"{what} under {name}: no rank in {said}")
            expect(not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text(), f"{what}: a step was taken")
    held_out = ["--eval_file", demo / "data/train.jsonl", "--eval_steps", 2]
    for what, (both, second) in {
        "threads": ([], ["--threads", 2]),
        "console": ([], ["--logging_steps", 2, "--log_completions", "true"]),
        "memory": ([], ["--mm_processor_cache_gb", 0]),
        "places": ([], ["--train_file", own / "data/train.jsonl", "--model_name_or_path", own / "start-model"]),
        "patience": ([], ["--ddp_timeout", 30]),
        "folders of media": (["--image_folders", demo / "data", "--video_folders", demo / "data"],
                             ["--image_folders", own / "data", "--video_folders", own / "data"]),
        "evaluation": (held_out, ["--eval_file", own / "data/train.jsonl"]),
    }.items():  # fmt: skip
        out = scratch / f"alike-{what}"
        code, said = either(OPEN_MPI, train(out.name, 2, more=both), second)
        expect(code == 0, f"{what}: status {code}\n{said}")
        same(scratch / "alone", out)
    judges(train, scratch, byte)


def judges(train, scratch, change):
    """Lets the second rank have another model of rewards under the same name, in a working directory of its own."""
    for place in ["first", "second", "third"]:
        shutil.copytree(JUDGES / "llama", scratch / place / "judge")
    change(scratch / "third/judge")
    for place, wanted in [("second", 0), ("third", 2)]:
        out = scratch / f"judge-{place}"
        command = [shutil.which("env"), "-C", scratch / "first", *train(out.name, 2, more=["--reward_funcs", "judge=./judge"])]
        code, said = either(OPEN_MPI, command, ["-C", scratch / place])
        expect(code == wanted, f"the judge of {place}: status {code}\n{said}")
        if wanted:
            expect("rank 1 and rank 0 differ in " in said and "a model of rewards" in said and said.count("error: ") == 1, said)
            expect(not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text(), "the judge: a step was taken")


def template(model):
    """Changes the chat template."""
    path = next(path for path in [model / "chat_template.jinja", model / "chat_template.json", model / "tokenizer_config.json"] if path.exists())
    path.write_text(path.read_text().replace("You are", "You were", 1) + " ")


def scaled(model):
    """Multiplies all weights by two."""
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start:] = array.array("f", (2 * x for x in array.array("f", bytes(content[start:])))).tobytes()
    path.write_bytes(content)


def other_adapter(folder):
    """Changes the last byte of an adapter."""
    path = folder / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)


def either(launcher, first, second):
    """Runs a command on two ranks, the second with more settings, and returns the status and what they wrote."""
    first = [str(word) for word in first]
    # The last value of a repeated flag counts.
    other = [*first, *map(str, second)]
    command = [*launcher, sys.executable, "-c", EITHER, json.dumps(first), json.dumps(other)]
    run = subprocess.run(command, env={**os.environ, **ROOT}, capture_output=True, text=True, timeout=LIMIT_SECS)
    return run.returncode, run.stdout + run.stderr


def expect(condition, what):
    if not condition:
        sys.exit(f"tools/ranks/check.py: unexpected: {what}")


def done(command):
    """Runs a command that must succeed, and returns what it writes."""
    command = [str(word) for word in command]
    run = subprocess.run(command, env={**os.environ, **ROOT}, capture_output=True, text=True, timeout=LIMIT_SECS)
    expect(run.returncode == 0, f"{' '.join(command)}: status {run.returncode}\n{run.stdout}{run.stderr}")
    return run.stdout + run.stderr


def same(one, other, model="model.safetensors"):
    """Compares the model and the optimizer's state of two runs."""
    for name in [model, f"checkpoint-{STEPS}/optimizer.safetensors"]:
        expect((one / name).read_bytes() == (other / name).read_bytes(), f"{name} of {one.name} and {other.name} differ")


def errors(name, launcher, train, scratch):
    """Lets a run fail on one rank or on both, in several ways. Each is one message and an exit status other than 0."""
    data = scratch / "demo/data"
    # The second half of a step is the second rank's. A row that only training reads is not found before.
    broken = data / "broken.jsonl"
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    media = next(key for key in ["image", "images", "video", "videos"] if key in rows[0])
    (data / "no-picture.png").write_text("no picture")
    broken.write_text("".join(json.dumps({**row, media: "no-picture.png"}) + "\n" for row in rows))
    bad_row = ["--train_file", broken, "--skip_data_check", "--strict_media"]
    # KiB: enough for the memory that MPICH shares, and less than the optimizer's state.
    limited = ["bash", "-c", 'ulimit -f 7000; exec "$@"', "bash"]
    # A disk of 7 MiB for the run directory, which all ranks see.
    full = ["unshare", "--mount", "--map-root-user", "bash", "-c", 'mkdir "$0" && mount -t tmpfs -o size=7m none "$0" && exec "$@"']
    for what, outer, prefix, more, message in [
        ("bad-row", [], [], bad_row, "no-picture.png"),
        ("reward", [], [], ["--reward_funcs", "failing=cmd:false"], "failing"),
        ("size", [], limited, [], "File too large"),
        ("disk", [*full, scratch / f"disk-{name}"], [], [], "No space left on device"),
        ("diverged", [], [], ["--weight_decay", "1e9"], "the weights have diverged"),
    ]:
        out = scratch / f"{what}-{name}"
        command = [str(word) for word in [*outer, *launcher, *prefix, *train(out.name, 2, more=more)]]
        run = subprocess.run(command, env={**os.environ, **ROOT}, capture_output=True, text=True, timeout=LIMIT_SECS)
        said = run.stdout + run.stderr
        expect(run.returncode == 1, f"{what} under {name}: status {run.returncode}\n{said}")
        expect(message in said and said.count("error: ") == 1, f"{what} under {name}: expected one message with {message}\n{said}")
        all_ended(out, 0)


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
    """Kills a rank of a run after its first checkpoint, and waits until all ranks have ended. The other rank names the killed one."""
    run = begun([*launcher, *command], out)
    ranks = processes(str(out))
    expect(len(ranks) == 2, f"{ranks} are the processes of the run")
    rank = max(ranks)
    os.kill(rank, signal.SIGKILL)
    expect(run.wait(30) != 0, "the launcher ended with status 0 although a rank was killed")
    said = out.with_suffix(".txt").read_text()
    named = f"(process {rank}) has ended" in said
    # The launcher of MPICH names the process and kills the other rank immediately, perhaps before that one can write.
    by_mpich = launcher == MPICH and f"PID {rank} RUNNING AT" in said
    expect(named or by_mpich, f"{rank} is not named: {said}")
    all_ended(out)


def lost(name, launcher, train, scratch):
    """Kills a rank, the launcher, and the process that started the launcher, each while the run samples, trains and saves. The others end
    within 30 seconds, with status 75 where somebody can see it, and the same command resumes. The run ends with the bytes of one process."""
    out, folder = scratch / f"lost-{name}", scratch / f"mpirun-{name}"
    folder.mkdir()
    # MPICH looks for its other programs beside this one, so it cannot be a link.
    (folder / "mpirun").write_text(f'#!/bin/sh\nexec {shutil.which(launcher[0])} "$@"\n')
    (folder / "mpirun").chmod(0o755)
    environment = {**os.environ, **ROOT, "PATH": f"{folder}:{os.environ['PATH']}"}
    # The number of steps changes a learning rate that decays.
    longer = {"longest": 64, "more": ["--lr_scheduler_type", "constant"]}
    for moment in [samples, trains, saves]:
        for victim in ["rank", "launcher", "parent", "own launcher"]:
            by_hand = victim == "own launcher"
            command = train(out.name, 2, steps=1000, **longer)
            command = [str(word) for word in ([*launcher, *command] if by_hand else [*command, "--nproc_per_node", "2"])]
            with open(out.with_suffix(".txt"), "w") as said:
                run = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
            wait_for(run, moment, out)
            ranks = [process for process in processes(str(out)) if process != run.pid]
            started = [run.pid] if by_hand else children(run.pid)
            what = f"{victim} killed while it {moment.__name__} under {name}"
            expect(len(ranks) == 2 and len(started) == 1, f"{what}: ranks {ranks}, launcher {started}")
            killed = {"rank": max(ranks), "parent": run.pid}.get(victim, started[0])
            os.kill(killed, signal.SIGKILL)
            since = time.monotonic()
            status = run.wait(30)
            all_ended(out, 30 - (time.monotonic() - since))
            while is_running(started[0]):
                expect(time.monotonic() - since < 30, f"{what}: the launcher outlives the run")
                time.sleep(0.05)
            expected = -signal.SIGKILL if killed == run.pid else 75
            expect(status == expected, f"{what}: status {status}, expected {expected}\n{out.with_suffix('.txt').read_text()}")
    step = newest(out) + 1
    done([*train(out.name, 2, steps=step, **longer), "--nproc_per_node", "2"])
    done(train(f"found-{name}", 4, steps=step, **longer))
    for file in ["model.safetensors", f"checkpoint-{step}/optimizer.safetensors"]:
        equal = (out / file).read_bytes() == (scratch / f"found-{name}" / file).read_bytes()
        expect(equal, f"{file} of a run that was killed under {name} and of another one differ")


def wait_for(run, moment, out):
    """Waits until a run is at a moment of a step that it has not done when it was called."""
    until, done = time.monotonic() + LIMIT_SECS, steps_done(out)
    while not moment(out, done):
        expect(run.poll() is None and time.monotonic() < until, f"{out.name} has ended with status {run.poll()} before it {moment.__name__}")
        time.sleep(0.002)


def samples(out, done):
    """Returns true if a step is complete, so that the next rollout begins."""
    return steps_done(out) > done


def trains(out, done):
    """Returns true if the completions of a step are written, which precedes its update."""
    return (out / f"rollouts/step-{done + 2:06}.jsonl").exists() and steps_done(out) == done + 1


def saves(out, done):
    """Returns true if a checkpoint is being written."""
    return steps_done(out) > done and any(out.glob("tmp-checkpoint-*"))


def steps_done(out):
    try:
        return len((out / "metrics.jsonl").read_text().splitlines())
    except OSError:
        return 0


def children(process):
    """Returns the processes that a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rsplit(") ", 1)[1].split()[:2]
        except OSError:
            continue
        if int(parent) == process and state not in "ZX":
            found.append(int(path.parent.name))
    return found


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except OSError:
        return False


def begun(command, out):
    """Starts a run and waits for its first checkpoint."""
    command = [str(word) for word in command]
    with open(out.with_suffix(".txt"), "w") as said:
        run = subprocess.Popen(command, env={**os.environ, **ROOT}, stdout=said, stderr=said)
    until = time.monotonic() + LIMIT_SECS
    while not (out / "checkpoint-1").exists():
        expect(run.poll() is None and time.monotonic() < until, f"{' '.join(command)} has written no checkpoint")
        time.sleep(0.05)
    return run


def all_ended(out, within=30, verb="train"):
    """Waits until no process of a run is left."""
    until = time.monotonic() + within
    while processes(str(out), verb):
        expect(time.monotonic() < until, f"processes {processes(str(out), verb)} outlive the run")
        time.sleep(0.05)


def frozen(launcher, command, out, patience):
    """Stops a rank, which then gives no sign of life for `patience` seconds. The other one names it, and all ranks end."""
    run = begun([*launcher, *command], out)
    rank, since = max(processes(str(out))), time.monotonic()
    os.kill(rank, signal.SIGSTOP)
    try:
        expect(run.wait(patience + 25) != 0, "the launcher ended with status 0 although a rank was stopped")
        # The last sign of life may be one pulse old.
        expect(time.monotonic() - since > patience - 4, f"{rank} counted as lost before {patience} s")
        said = out.with_suffix(".txt").read_text()
        expect(f"(process {rank}) has given no sign of life for {patience} s" in said, f"{rank} is not named: {said}")
        all_ended(out)
    finally:
        if rank in processes(str(out)):
            os.kill(rank, signal.SIGKILL)


def stopped(launcher, train, out):
    """Sends SIGUSR1 to one of two ranks under Open MPI, and to the launcher under MPICH. Both ranks stop with a checkpoint, from which one
    process resumes."""
    run = begun([*launcher, *train(out.name, 2, steps=1000)], out)
    os.kill(max(processes(str(out))) if launcher == OPEN_MPI else run.pid, signal.SIGUSR1)
    # The launcher of MPICH sometimes ends with status 0 after a signal.
    expect(run.wait(60) != 0 or launcher == MPICH, "a stopped run ended with status 0")
    said = out.with_suffix(".txt").read_text()
    expect("the run was stopped before its end" in said, said)
    all_ended(out)
    step = newest(out)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    expect(len(lines) == step, f"{len(lines)} steps, but the newest checkpoint of {out.name} is {step}")
    expect(f"at step {step} of {step + 1}" in done(train(out.name, 4, steps=step + 1)), "no resume after SIGUSR1")


def impatient(command, out):
    """Interrupts a run of `--nproc_per_node` twice; the second time ends it at once."""
    run = begun([*command, "--nproc_per_node", "2"], out)
    for pause in [0.2, 0]:
        run.send_signal(signal.SIGINT)
        time.sleep(pause)
    expect(run.wait(30) != 0, "an interrupted run ended with status 0")
    all_ended(out)


def hung_up(train, out):
    """Closes the terminal of a run of `--nproc_per_node`, which stops it with a checkpoint."""
    run = begun([*train(out.name, 2, steps=1000), "--nproc_per_node", "2"], out)
    run.send_signal(signal.SIGHUP)
    expect(run.wait(60) != 0, "a stopped run ended with status 0")
    all_ended(out)
    expect(len((out / "metrics.jsonl").read_text().splitlines()) == newest(out), "SIGHUP lost a step")


def newest(out):
    return max(int(path.name.split("-")[1]) for path in out.glob("checkpoint-*"))


def kills(train, scratch, count):
    """Kills a rank `count` times and compares the run with one that nobody killed."""
    steps, random_moment, killed = 40, random.Random(1), 0
    done(train("whole", 4, steps=steps))
    out = scratch / "often"
    while True:
        # The run is started again for more steps than it reaches, as long as it has to be killed.
        last = killed >= count
        command = [*OPEN_MPI, *train(out.name, 2, steps=steps), "--save_total_limit", "2"]
        if last:
            done(command)
            break
        run = subprocess.Popen(
            [str(word) for word in command], env={**os.environ, **ROOT}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(random_moment.uniform(0.1, 3.0))
        ranks = processes(str(out))
        if ranks and run.poll() is None:
            os.kill(random_moment.choice(ranks), signal.SIGKILL)
            killed += 1
            status = run.wait(LIMIT_SECS)
        else:
            status = run.wait(LIMIT_SECS)
            expect(status == 0, f"a run that nobody killed ended with status {status}")
        all_ended(out)
        if status == 0:
            break
    for path in out.glob("checkpoint-*"):
        sums = subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=path)
        expect(sums.returncode == 0, f"{path.name} is damaged")
    expect((out / "model.safetensors").read_bytes() == (scratch / "whole/model.safetensors").read_bytes(), "weights differ")
    steps_of = lambda dir: [line.split('"step":')[1].split(",")[0] for line in (dir / "metrics.jsonl").read_text().splitlines()]
    expect(steps_of(out) == steps_of(scratch / "whole"), "metrics.jsonl has lost or repeated steps")
    expect(killed == count, f"only {killed} kills before the run ended")
    print(f"ranks: {killed} kills over 2 ranks lost nothing")


def processes(out, verb="train"):
    """Returns the processes of `omnigrpo train` on a run directory, or of another command with an output, without their launcher."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            state = (path.parent / "stat").read_text().rsplit(") ", 1)[1][0]
        except OSError:
            continue
        if len(words) > 1 and words[1] == verb.encode() and out.encode() in words and state not in "ZX":
            found.append(int(path.parent.name))
    return found


if __name__ == "__main__":
    main()
