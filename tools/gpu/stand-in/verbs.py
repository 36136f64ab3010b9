#!/usr/bin/env python3
"""Runs the commands of the program that use a GPU on the stand-in of a GPU and compares its numbers with the CPU's.

    tools/gpu/stand-in/verbs.py PROGRAM FOLDER

FOLDER is new and receives everything that the commands write. LD_LIBRARY_PATH has to name the stand-ins and NVRTC (see
`check`). A difference, a complaint of the stand-in, memory that is not freed, or work that no graph replayed is a failure.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "crates/models/tests/golden"
ROWS = [
    {"id": "shapes", "image": "shapes.png", "problem": "<image>\nWhich shape is red?", "solution": "<answer>square</answer>"},
    {"id": "sum", "problem": "What is 2+3?", "solution": "<answer>5</answer>"},
]
# Largest difference to the CPU, relative and absolute.
RELATIVE, ABSOLUTE = 2e-3, 1e-5
# Arrays that live until the program ends: cuBLASLt's workspace, the array that stands for absent values, counters of blocks.
LASTING = 3
# Seconds that a check of a GPU may last too long.
LATE = 10

# Checkpoints of further families. HumanOmni is missing, since its towers are in separate directories.
FAMILIES = ["qwen2_vl_tied", "qwen3_vl", "qwen3_5", "internvl_hf", "aria"]
MODEL = f"--model {GOLDEN}/checkpoints/qwen2_5_vl_tied --torch_dtype float32 --threads 2"
STEPS = "--num_generations 4 --gradient_accumulation_steps 2 --max_steps 2 --max_completion_length 8 --min_completion_length 8"
UPDATE = "--learning_rate 1e-4 --adam_epsilon 1e-3"
ADAPTER = "--use_peft --lora_r 4 --lora_dropout 0"
TRAIN = f"train {MODEL} {STEPS} {UPDATE} --train_file rows.jsonl --eval_file rows.jsonl --reward_funcs random --output_dir OUT"


class Failure(Exception):
    """What went wrong, for the user."""


def run(program, place, words, device, code=0, **environment):
    """Runs a command that ends with `code`. Returns its output and the reports of the stand-in."""
    reports = place / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    command = [program, *words.split(), *(["--device", device] if device else [])]
    variables = {**os.environ, "STAND_IN_REPORT": str(reports), "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(place / "cache"), **environment}
    done = subprocess.run(command, cwd=place, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != code:
        raise Failure(f"exit code {done.returncode} of {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    found = [json.loads(path.read_text()) for path in reports.iterdir()]
    for report in found:
        if report["complaints"]:
            raise Failure("the stand-in complains:\n" + "\n".join(report["complaints"]))
    return done.stdout + done.stderr, found


def numbers(value, at=""):
    """Yields the path and the value of each number that does not depend on time or memory, and of each text."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not any(word in key for word in ("time", "per_sec", "memory", "machine", "bytes", "path", "device")):
                yield from numbers(inner, f"{at}/{key}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from numbers(inner, f"{at}/{i}")
    else:
        yield at, value


def compare(cpu, gpu, least):
    """Compares two files of JSON lines. Fails if they differ, or have fewer than `least` numbers."""
    want, got = ([pair for line in path.read_text().splitlines() for pair in numbers(json.loads(line))] for path in (cpu, gpu))
    if [at for at, _ in want] != [at for at, _ in got]:
        raise Failure(f"{gpu} has other fields than {cpu}")
    count, most = 0, 0.0
    for (at, want), (_, got) in zip(want, got):
        if not isinstance(want, float):
            if want != got:
                raise Failure(f"{gpu}: {at} is {got!r}, and {want!r} on the CPU")
            continue
        share = abs(got - want) / (RELATIVE * abs(want) + ABSOLUTE)
        if not share <= 1:
            raise Failure(f"{gpu}: {at} is {got}, and {want} on the CPU")
        count, most = count + 1, max(most, share)
    if count < least:
        raise Failure(f"{gpu}: {count} numbers, expected at least {least}")
    return f"{count} numbers, at most {most:.0%} of the allowed difference"


def on_both(program, place, name, line, results, least, only_gpu="", replays=False, uses="cubins", gpu="cuda:0", **environment):
    """Runs a command on the CPU and on the stand-in and compares the files `results`.

    OUT in the line is the place of its output. `uses` is a number of the report that must not be 0.
    """
    for device in ("cpu", gpu):
        out = f"{name}-{device[:3]}"
        words = line.replace("OUT", out) + (f" {only_gpu}" if device != "cpu" else "")
        _, found = run(program, place, words, device, **environment)
    if len(found) != 1:
        raise Failure(f"{len(found)} processes used the stand-in, expected 1")
    report = found[0]
    if report["live_allocations"] > LASTING:
        raise Failure(f"{report['live_allocations']} arrays were not freed, expected at most {LASTING}")
    for number in [uses] + ["graph_nodes"] * replays:
        if not report.get(number):
            raise Failure(f"the report has no `{number}`")
    same = [compare(place / result.replace("OUT", f"{name}-cpu"), place / result.replace("OUT", f"{name}-cud"), least) for result in results]
    peak, launches = report["peak_bytes"] / 1e6, report["launches"]
    return f"{'; '.join(same)}; {launches:,} kernels, {report.get('graph_nodes', 0):,} nodes of graphs, {peak:.1f} MB"


def says(program, place, line, device, parts, code=0, **environment):
    """Runs a command and looks for texts in its output."""
    text, _ = run(program, place, line, device, code, **environment)
    for part in parts:
        if part not in text:
            raise Failure(f"`{part}` is not in\n{text}")
    return f"says {', '.join(parts)}"


def checks_in_time(program, place):
    """Checks the GPU while no kernel is compiled, and again. The first check lasts about ten seconds, whatever the compiler needs."""
    cache = {"XDG_CACHE_HOME": str(place / "nothing-compiled")}
    first, again = (run(program, place, "doctor --gpu", None, **cache)[0] for _ in range(2))
    secs = float(re.search(r"^ +time +([0-9.]+) s$", first, re.M)[1])
    compiled, all_ = (int(n) for n in re.search(r"^ +compilation +([0-9]+) of ([0-9]+) files", first, re.M).groups())
    checked = re.findall(r"^ +(\w+)\.cu +relative error", first, re.M)
    late = re.search(r"not in time, so not checked: ([a-z_, ]+) \(", first)
    late = late[1].split(", ") if late else []
    if sorted(checked + late) != sorted(path.stem for path in (ROOT / "crates/gpu/cuda").glob("*.cu")) or len(checked) != compiled:
        raise Failure(f"checked {checked} and too late for {late}, of {all_} files\n{first}")
    for part in ("GB/s", "TFLOP/s", "72 kinds"):
        if part not in first:
            raise Failure(f"`{part}` is not in\n{first}")
    # A compilation ends about a second late, or later if other programs use the machine.
    if secs > 10 + LATE:
        raise Failure(f"the check lasted {secs} s, expected about 10 s\n{first}")
    count = len(re.findall(r"^ +\w+\.cu +relative error", again, re.M))
    if count < len(checked):
        raise Failure(f"the second check has {count} kernels, the first one {len(checked)}\n{again}")
    return f"{secs} s, {compiled} of {all_} files compiled; {count} checked the second time"


def plans(program, place, line):
    """Trains experts, which have different numbers of rows, with plans for rounded numbers of rows, and where none of them supports other sizes."""
    reports = [
        run(program, place, line.replace("OUT", f"plans-{exact}"), "cuda:0", STAND_IN_EXACT_PLANS=str(exact))[1][0] for exact in (0, 1)]
    compare(place / "plans-0/metrics.jsonl", place / "plans-1/metrics.jsonl", 10)
    few, many = (report["plans"] for report in reports)
    if not 2 * few <= many:
        raise Failure(f"{few} plans, and {many} where each product needs its own")
    return f"{reports[0]['products']:,} products by {few} plans, or by {many} where each size needs its own"


def load(path):
    """Looks for the load of the card in the metrics of each step: the defaults of the stand-in's NVML."""
    steps = [row for row in map(json.loads, path.read_text().splitlines()) if "step_time" in row]
    found = {(row.get("machine/gpu_percent"), row.get("machine/gpu_memory_mb")) for row in steps}
    if found != {(50.0, 2**30 / 1e6)}:
        raise Failure(f"{path} has the loads {found}, expected 50 % and a quarter of 4 GiB")
    return f"50 % busy, 1 GiB in use, in {len(steps)} steps"


def cases(program, place):
    """Yields each case: its name and the function that runs it."""
    both = lambda *args, **more: lambda: on_both(program, place, *args, **more)  # noqa: E731
    given = [dict(row, completions=["<answer>square</answer>", "So it is 5."]) for row in ROWS]
    (place / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    metrics = ["OUT/metrics.jsonl"]
    yield "doctor", lambda: says(program, place, "doctor", None, ["can be used", "cuda:0, which `--device auto` takes"])
    health = ["sm_90a", "580.65.06", "0 uncorrected errors", "not reduced, 40 °C"]
    # The suite of the kernels checks those of all files, whatever their compilation takes.
    checked = ["elementwise.cu   relative error", "36 kinds", "72 kinds", "GB/s", "TFLOP/s"]
    yield "doctor --gpu", lambda: says(program, place, "doctor --gpu", None, health + checked)
    yield "doctor --gpu, nothing compiled", lambda: checks_in_time(program, place)
    ill = ["3 uncorrected errors of memory", "its temperature is too high", "MIG is on", "the GPU cannot be trusted"]
    yield "doctor --gpu, ill", lambda: says(
        program, place, "doctor --gpu", None, ill, 1, STAND_IN_ECC_ERRORS="3", STAND_IN_THROTTLE="32", STAND_IN_MIG="1")
    newer = ["cuda:0 cannot be used", "libcublasLt.so.13 is version 14.0, expected at most 13"]
    yield "doctor --gpu, a library newer than the driver", lambda: says(
        program, place, "doctor --gpu", None, newer, 1, STAND_IN_CUBLASLT="140000")
    yield "doctor --gpu, failing kernel", lambda: says(
        program, place, "doctor --gpu", None, ["elementwise.cu: a kernel failed", "the last ones were elementwise/cast"], 1,
        STAND_IN_FAULT="elementwise/cast")
    yield "train", both("train", TRAIN, metrics, 50, replays=True)
    yield "train, load of the card", lambda: load(place / "train-cud/metrics.jsonl")
    yield "train, offloaded", both("offload", TRAIN, metrics, 50, only_gpu="--offload_optimizer", replays=True)
    yield "train, adapters", both("lora", f"{TRAIN} {ADAPTER} --gradient_checkpointing", metrics, 50, replays=True)
    sft = f"sft {MODEL} {UPDATE} --train_file rows.jsonl --max_steps 2 --gradient_accumulation_steps 2 --output_dir OUT"
    yield "sft", both("sft", sft, metrics, 10)
    yield "eval", both(
        "eval", f"eval {MODEL} --eval_file rows.jsonl --output OUT.jsonl --max_completion_length 6 --reward_funcs random",
        ["OUT.jsonl"], 2, replays=True)
    generate = f"generate {MODEL} --input rows.jsonl --output OUT.jsonl --max_completion_length 6 --temperature 0"
    yield "generate", both("generate", generate, ["OUT.jsonl"], 10, replays=True)
    for family in FAMILIES:
        of = lambda line, family=family: line.replace("qwen2_5_vl_tied", family)  # noqa: E731
        yield f"sft, {family}", both(f"sft-{family}", of(sft), metrics, 10)
        yield f"generate, {family}", both(f"generate-{family}", of(generate), ["OUT.jsonl"], 10, replays=True)
    yield "sft, aria, plans", lambda: plans(program, place, sft.replace("qwen2_5_vl_tied", "aria"))
    score = f"score {MODEL} --input given.jsonl --output OUT.jsonl"
    yield "score", both("score", score, ["OUT.jsonl"], 20)
    # NVRTC 13.0 does not know this architecture, so the driver has to compile PTX.
    yield "a newer GPU", both("newer", score, ["OUT.jsonl"], 20, uses="ptx_modules", STAND_IN_ARCHITECTURE="130")
    yield "a second GPU", both("second", score, ["OUT.jsonl"], 20, gpu="cuda:1", STAND_IN_DEVICES="2")
    fails = lambda parts, **environment: lambda: says(program, place, TRAIN, "cuda:0", parts, 1, **environment)  # noqa: E731
    last = "the last ones were"
    yield "a failing kernel", fails(["a kernel failed", "an illegal memory access", f"{last}", "norms/rms"], STAND_IN_FAULT="norms/rms")
    yield "a failing kernel, blocking", fails(
        ["cuLaunchKernel", f"{last} norms/rms, "], STAND_IN_FAULT="norms/rms", CUDA_LAUNCH_BLOCKING="1")
    yield "too little memory", fails(["out of GPU memory", "of 35200000 free"], STAND_IN_MEMORY="35200000")
    yield "an occupied GPU", fails(["cannot be opened", "another program uses this GPU"], STAND_IN_MEMORY="20000000")
    yield "plan", lambda: says(program, place, TRAIN.replace("train", "plan", 1), "cuda:0", ["weights", "activations"])
    # The evaluations of `demo` take minutes on the stand-in, so only a step from its model and on its rows runs there.
    yield "demo", lambda: says(program, place, "demo --output_dir demo --max_steps 1", "cpu", ["run directory: demo"])
    demo = f"{STEPS} {UPDATE} --torch_dtype float32 --train_file demo/data/train.jsonl --reward_funcs accuracy random --output_dir OUT"
    yield "train, model of the demo", both("of-demo", f"train --model demo/start-model {demo}", metrics, 20, replays=True)


def main():
    program, place = (pathlib.Path(word).resolve() for word in sys.argv[1:3])
    place.mkdir(parents=True)
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    shutil.copy(GOLDEN / "media/shapes.png", place)
    failed = 0
    for name, case in cases(program, place):
        try:
            print(f"{name}: {case()}", flush=True)
        except Failure as failure:
            print(f"{name}: FAILED: {failure}", flush=True)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
