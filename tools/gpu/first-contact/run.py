#!/usr/bin/env python3
"""Runs the first half hour on a card, in stages with time limits, and writes what happens as JSON lines.

    python3 first-contact/run.py [--stages ABCDEF] [--results results.jsonl] [--scale 1.0] [--device N]

Each line of the results is written as soon as it is known, so a run that is cut off keeps its results; `report.py` makes a page of
them. A stage that runs out of time fails. Only Python's standard library is needed. Libraries are searched in the packages of this
Python, in LD_LIBRARY_PATH, and where the program itself searches.
"""

import argparse
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
MODEL = HERE / "models/qwen2_5_vl_tied"
# Tiny checkpoints of which training steps are compared; the first one also with an environment that answers every turn. Models that
# read text only take the second row.
TEXTS = ["qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "llama"]
FAMILIES = ["qwen2_5_vl_tied", "qwen2_vl_tied", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "aria", "internvl_hf", "internvl3_5_hf", "smolvlm", "humanomni",
            "omni", *TEXTS]
ANSWERS = """import json, sys
for line in sys.stdin:
    it = json.loads(line)
    more = {"tools": [], "answers_text": True, "opens": False} if it.get("probe") else {"answer": "Look again.", "role": "user"}
    print(json.dumps({"id": it["id"], **more}), flush=True)
"""
ROWS = [
    {"id": "shapes", "image": "shapes.png", "problem": "<image>\nWhich shape is red?", "solution": "<answer>square</answer>"},
    {"id": "sum", "problem": "What is 2+3?", "solution": "<answer>5</answer>"},
]
# Sizes of the measurements: prompt tokens, completions, tokens per completion. With 8 and 64 completions a decoding batch is
# one of the fixed sizes, with 12 it has padding.
SPEED = [("3b", (1792, 8, 256)), ("3b", (1792, 12, 64)), ("3b", (1792, 64, 64)), ("7b", (1792, 8, 256))]
TINY = [("qwen2_5_vl_tied", (20, 2, 4))]
# Fields of a step that must agree between a card and the CPU.
COMPARED = ["loss", "reward", "grad_norm", "kl"]
# Kernels that are profiled, as a pattern.
PROFILED = "forward_128|forward_wide_128|backward_kv_128|few_rows_1|few_swiglu_1"
# Why a result is missing after the end of its stage.
NO_TIME = "the stage's time is over"
# Tests with more than 2³¹ elements, which stage D runs.
LARGE = "more_than_2_31"
# Small tests for tools that make a program slow. With the slow ones, which have each width of heads, they launch every kernel.
SMALL = [
    "a_router_chooses_the_largest_logits",
    "a_row_has_the_same_bits_in_every_batch",
    "attention_has_the_same_bits_on_every_card",
    "attention_in_windows",
    "attention_of_wide_heads_has_the_same_bits_on_every_card",
    "decoding_does_not_depend_on_the_batch",
    "decoding_of_every_group_size",
    "draws_are_those_of_a_sorted_row",
    "edges::draws_from_nan",
    "edges::padded_decoding",
    "edges::the_same_bits_in_every_run",
    "plain_attention_of_any_width",
    "products_with_codes_equal_those_with_widened_weights",
    "quantised_weights_are_widened",
    "recurrent::steps_continue_states",
    "step::queries_and_keys_are_turned_as_by_their_own_kernels",
    "swiglu_of_few_rows_has_the_bits_of_two_kernels",
    "updates_in_few_bits_are_those_of_the_cpu",
]


class Run:
    """The results file, the clock of the current stage, and the environment of programs."""

    def __init__(self, args):
        self.args = args
        try:
            self.file = open(args.results, "x")
        except FileExistsError:
            sys.exit(f"{args.results} exists: move it, or name another file with --results")
        self.began = time.monotonic()
        self.ends = self.began
        self.stage = "-"
        self.failed = False
        folders = python_folders() + os.environ.get("LD_LIBRARY_PATH", "").split(":")
        self.environment = {
            **os.environ,
            "LD_LIBRARY_PATH": ":".join(filter(None, folders)),
            "XDG_CACHE_HOME": str(HERE / "cache"),
            "HF_HUB_OFFLINE": "1",
            "OMNIGRPO_TEST_CARD": str(args.device),
        }

    def tell(self, name, ok, **more):
        """Writes a result at once. Only a result with `skipped`, whose test this machine cannot run, may be missing."""
        self.failed |= not ok and "skipped" not in more
        line = {"stage": self.stage, "name": name, "ok": ok, "at": round(time.monotonic() - self.began, 1), **more}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        print(f"{self.stage} {'ok     ' if ok else 'skipped' if 'skipped' in more else 'FAILED '} {name}", flush=True)
        return ok

    def left(self):
        """Returns the seconds until the stage ends."""
        return self.ends - time.monotonic()

    def call(self, name, command, limit=None, tell=True, each=None, **environment):
        """Runs a command until the stage ends, and tells the result. `each` receives every line of output as it comes.

        Returns the output, or None if the command failed. All processes that the command started end with it.
        """
        left = min(self.left(), limit or float("inf"))
        if left <= 0:
            self.tell(name, False, ended_with=NO_TIME)
            return None
        started, lines = time.monotonic(), []
        try:
            process = subprocess.Popen(
                [str(word) for word in command], cwd=HERE, env={**self.environment, **environment}, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
        except OSError as error:
            self.tell(name, False, ended_with=str(error))
            return None

        def read():
            for line in process.stdout:
                lines.append(line)
                if each:
                    each(line)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            code = "the time limit"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            reader.join(10)
        text, secs = "".join(lines), round(time.monotonic() - started, 2)
        if code != 0:
            self.tell(name, False, secs=secs, ended_with=code, output=text[-4000:])
            return None
        if tell:
            self.tell(name, True, secs=secs)
        return text


def python_folders():
    """Returns the folders of libraries in the `nvidia` packages of this Python."""
    try:
        import nvidia
    except ImportError:
        return []
    return [str(lib) for path in nvidia.__path__ for lib in sorted(pathlib.Path(path).glob("*/lib"))]


def nvidia_tool(name):
    """Returns a program of NVIDIA's, or None."""
    packages = [pathlib.Path(lib).parent / "bin" / name for lib in python_folders()]
    places = [shutil.which(name), f"/usr/local/cuda/bin/{name}", *packages]
    return next((place for place in places if place and pathlib.Path(place).exists()), None)


def stage_a(run):
    """Shows what is loaded, and checks products, rates and a kernel of each file, as far as they are compiled in time."""
    started = run.left()
    text = run.call("doctor --gpu", [HERE / "omnigrpo", "doctor", "--gpu"])
    # Each check of ten seconds compiles more of the kernels.
    while text is not None and "not in time" in text and run.left() > started / 2:
        text = run.call("doctor --gpu, again", [HERE / "omnigrpo", "doctor", "--gpu"])
    if text is not None:
        run.tell("what doctor says", True, output=text)


def tests_of(run, suite):
    """Returns the names of all tests. A rehearsal has no time for the slow ones, which a card runs in seconds."""
    listed = run.call(f"{suite}: list", [HERE / "tests" / suite, "--list"], tell=False) or ""
    names = [line.removesuffix(": test") for line in listed.splitlines() if line.endswith(": test")]
    skipped = ["planted"] + ["slow_", LARGE] * run.args.tiny
    return [name for name in names if not any(part in name for part in skipped)]


def test(suite, *names):
    return [HERE / "tests" / suite, *names, "--exact", "--include-ignored", "--test-threads=1"]


def stage_b(run):
    """Runs each test of kernels and devices by itself; a failure again with a wait after every kernel."""
    for suite in ("kernels", "devices"):
        for name in tests_of(run, suite):
            if LARGE in name:
                continue
            if run.call(f"{suite}::{name}", test(suite, name)) is None and run.left() > 0:
                run.call(f"{suite}::{name}, blocking", test(suite, name), CUDA_LAUNCH_BLOCKING="1")


def stage_c(run):
    """Runs small tests of every kernel under the tools of NVIDIA's sanitizer, a tool for each part of the time."""
    program = nvidia_tool("compute-sanitizer")
    if program is None:
        run.tell("compute-sanitizer", False, skipped="compute-sanitizer was not found; `pip install nvidia-cuda-sanitizer-api` has it")
        return
    names = [name for name in tests_of(run, "kernels") if name in SMALL or name.startswith("slow_")]
    tools = ["memcheck", "initcheck", "racecheck", "synccheck"]
    for i, tool in enumerate(tools):

        def each(line, tool=tool):
            if done := re.match(r"test (\S+) \.\.\. (ok|FAILED)$", line):
                run.tell(f"{tool}: {done[1]}", done[2] == "ok")

        command = [program, "--tool", tool, "--error-exitcode", "9", *test("kernels", *names)]
        run.call(tool, command, limit=run.left() / (len(tools) - i), each=each)


# Result of `bench` on a tenth of the step that EasyR1 publishes.
PUBLISHED = "a tenth of EasyR1's step"


def write_rows():
    (HERE / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def stage_d(run):
    """Compares the bits of two processes that decode with recorded graphs. Then runs the tests with more than 2³¹ elements."""
    write_rows()
    hashes = []
    for i in range(2):
        out = HERE / f"bits-{i}.jsonl"
        words = ["generate", "--model", MODEL, "--device", f"cuda:{run.args.device}", "--input", "rows.jsonl", "--output", out,
                 "--max_completion_length", "24", "--min_completion_length", "24", "--temperature", "1"]
        if run.call(f"generate, process {i + 1}", [HERE / "omnigrpo", *words]) is not None:
            hashes.append(hashlib.sha256(out.read_bytes()).hexdigest())
    run.tell("two processes give the same bits", len(hashes) == 2 and hashes[0] == hashes[1], hashes=hashes)
    for name in tests_of(run, "kernels"):
        if LARGE in name:
            run.call(f"kernels::{name}", test("kernels", name))


def stage_e(run):
    """Measures products, attention, decoding, a training pass and an optimizer step."""
    for model, sizes in TINY if run.args.tiny else SPEED:

        def each(line, model=model, sizes=sizes):
            if line.startswith("{"):
                one = json.loads(line)
                why = one["is"].get("skipped")
                skipped = {"skipped": f"{model}: {why}"} if why else {}
                run.tell("measured", not why, model=model, sizes=sizes, **one, **skipped)

        name = f"speed, {model}, {'×'.join(map(str, sizes))}"
        run.call(name, [HERE / "gpu", f"cuda:{run.args.device}", HERE / "models" / model, *sizes], each=each)
    small = ["--model_name_or_path", MODEL, "--num_prompts", "2", "--prompt_tokens", "16", "--completion_tokens", "8", "--image_px", "56"]
    words = ["bench", "--workload", "easyr1-3b", "--gradient_checkpointing", "--device", f"cuda:{run.args.device}"]
    run.call(PUBLISHED, [HERE / "omnigrpo", *words, *(small if run.args.tiny else ["--num_prompts", "51"])])
    profiler = nvidia_tool("ncu")
    if profiler is None:
        run.tell("ncu", False, skipped="ncu was not found; it is a part of the CUDA toolkit")
        return
    model, sizes = (TINY if run.args.tiny else SPEED)[0]
    words = ["--clock-control", "none", "--set", "full", "--kernel-name", f"regex:{PROFILED}", "--launch-count", "6"]
    program = [HERE / "gpu", f"cuda:{run.args.device}", HERE / "models" / model, *sizes]
    text = run.call("ncu", [profiler, *words, *program])
    if text is not None:
        # Without the measurements, which a profiler distorts.
        run.tell("what ncu says", True, output="".join(line for line in text.splitlines(True) if not line.startswith("{")))


def steps_of(folder):
    path = HERE / folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if "loss" in line]


def stage_f(run):
    """Compares training steps of each family on the card with the CPU's."""
    write_rows()
    (HERE / "text.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    (HERE / "answers.py").write_text(ANSWERS)
    # Some of many completions end a turn, and go on after the answer.
    one, turns = ["--num_generations", "4", "--max_completion_length", "8"], ["--num_generations", "8", "--max_completion_length", "96"]
    turns += ["--environment", "cmd:python3 answers.py", "--max_turns", "2"]
    for family, more in [(family, one) for family in FAMILIES] + [(FAMILIES[0], turns)]:
        name = f"{family} with turns" if more is turns else family
        for device in ("cpu", f"cuda:{run.args.device}"):
            shutil.rmtree(HERE / f"train-{device[:4]}", ignore_errors=True)
            words = ["train", "--model", HERE / "models" / family, "--device", device,
                     "--train_file", "text.jsonl" if family in TEXTS else "rows.jsonl", "--reward_funcs", "random",
                     "--torch_dtype", "float32", "--max_steps", "3", "--gradient_accumulation_steps", "2", "--learning_rate", "1e-4", "--adam_epsilon", "1e-3", "--output_dir", f"train-{device[:4]}"]
            run.call(f"train {name} on {device}", [HERE / "omnigrpo", *words, *more])
        cpu, card = steps_of("train-cpu"), steps_of("train-cuda")
        pairs = [(a[key], b[key]) for a, b in zip(cpu, card) for key in COMPARED if a.get(key) is not None]
        far = [abs(a - b) / (2e-3 * abs(a) + 1e-5) for a, b in pairs]
        if more is turns:
            run.tell("turns on the CPU", any(line["turns/max"] > 1 for line in cpu))
        same = len(cpu) == len(card) == 3 and bool(far) and max(far) <= 1
        # Among others, the seconds of each part of a step.
        run.tell(f"metrics of the card, {name}", bool(card), metrics=card)
        run.tell(f"steps on the card equal the CPU's, {name}", same, numbers=len(pairs), of_allowed=max(far, default=None))


# Letter, function, and seconds.
STAGES = [("A", stage_a, 60), ("B", stage_b, 240), ("C", stage_c, 300), ("D", stage_d, 120), ("E", stage_e, 480), ("F", stage_f, 300)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default="ABCDEF", help="letters of the stages to run")
    parser.add_argument("--results", type=pathlib.Path, default=HERE / "results.jsonl", help="new file for the results")
    parser.add_argument("--device", type=int, default=0, help="number of the card")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all time limits")
    parser.add_argument("--tiny", action="store_true", help="measure a tiny model, to rehearse")
    args = parser.parse_args()
    # A request to end stops the command that is running, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    run = Run(args)
    run.tell("begin", True, commit=(HERE / "commit").read_text().strip(), date=time.strftime("%Y-%m-%d", time.gmtime()))
    for letter, work, secs in STAGES:
        if letter in args.stages:
            run.stage, run.ends = letter, time.monotonic() + secs * args.scale
            work(run)
            if run.left() <= 0:
                run.tell("stage", False, ended_with=NO_TIME)
    run.stage = "-"
    run.tell("end", True)
    page = subprocess.run([sys.executable, HERE / "report.py", args.results], stdout=subprocess.PIPE, text=True, check=True).stdout
    args.results.with_name("gpu-results.md").write_text(page)
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
