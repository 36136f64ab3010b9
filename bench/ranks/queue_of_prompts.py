"""Measures what the queue of prompts saves: python3 bench/ranks/queue_of_prompts.py [--program P] [--page]

Needs `mpirun`, two cores and nothing else that runs on them. The demo's model learns to answer one kind of question with 16 tokens and
the other with 128 or more. One rollout then has as many of each, and two ranks with a thread each sample it. The same prompts without a
queue are two processes at the same time, each with the prompts that it would own; the slower one is the time of the rollout. With
`--page`, the table in docs/scale.md is replaced.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/scale.md"
ENVIRONMENT = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
SHORT, LONG = "abcdefghijklmno", "abcdefgh" * 20
QUESTIONS = {"short": "down", "long": "up"}
PROMPTS, COMPLETIONS, LONGEST, REPEATS = 32, 16, 128, 3


def started(words):
    return subprocess.Popen([str(word) for word in words], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def done(*runs):
    for run in runs:
        said = run.communicate()[0]
        if run.returncode:
            sys.exit(f"status {run.returncode}\n{said[-2000:]}")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def taught(program, place):
    """Returns a model that answers the two questions at their lengths."""
    done(started([program, "demo", "--max_steps", 1, "--num_generations", 2, "--output_dir", place / "demo"]))
    answers = {"short": SHORT, "long": LONG}
    asked = lambda kind: [{"role": "user", "content": QUESTIONS[kind]}, {"role": "assistant", "content": answers[kind]}]
    rows = [{"id": f"{kind}-{number}", "messages": asked(kind)} for kind in QUESTIONS for number in range(8)]
    out = place / "taught"
    done(started([
        program, "sft", "--model_name_or_path", place / "demo/start-model", "--train_file", write(place / "lessons.jsonl", rows), "--output_dir", out,
        "--max_steps", 150, "--learning_rate", "2e-3", "--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 1,
        "--max_completion_length", 200, "--save_strategy", "no",
    ]))  # fmt: skip
    return out


def question(kind, number):
    return {"id": f"{kind}-{number}", "problem": QUESTIONS[kind]}


def train(program, model, file, out, ranks, prompts):
    launcher = ["mpirun", "--bind-to", "none", "--oversubscribe", "-n", ranks] if ranks > 1 else []
    return [
        *launcher, program, "train", "--model_name_or_path", model, "--train_file", file, "--output_dir", out, "--reward_funcs", "random",
        "--num_generations", COMPLETIONS, "--max_completion_length", LONGEST, "--temperature", 0.2, "--per_device_train_batch_size", 1,
        "--gradient_accumulation_steps", prompts // ranks, "--max_steps", 1, "--save_strategy", "no", "--threads", 1, "--beta", 0, "--device", "cpu",
    ]  # fmt: skip


def secs(out):
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[0])["time/rollout"]


def records(out):
    """Returns id and length of the completions of the step, in the order of the prompts."""
    return [(row["id"], row["length"]) for row in map(json.loads, (out / "rollouts/step-000001.jsonl").read_text().splitlines())]


def halves(program, model, place, name, rows):
    """Returns the time of two processes, each with a half of the rows."""
    runs, outs = [], []
    for half, own in enumerate([rows[: len(rows) // 2], rows[len(rows) // 2 :]]):
        file, out = write(place / f"{name}-{half}.jsonl", own), place / f"{name}-{half}"
        runs.append(started(train(program, model, file, out, 1, len(own))))
        outs.append(out)
    done(*runs)
    return max(map(secs, outs))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=Path, default=ROOT / "target/release/omnigrpo")
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    program, lines = args.program.resolve(), []
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        model = taught(program, place)
        rows = [question(kind, number) for number in range(PROMPTS // 2) for kind in QUESTIONS]
        file = write(place / "rows.jsonl", rows)
        queue, in_order, worst = [], [], []
        for repeat in range(REPEATS):
            out = place / f"queue-{repeat}"
            done(started(train(program, model, file, out, 2, PROMPTS)))
            queue.append(secs(out))
            order = [name for name, _ in records(out)][::COMPLETIONS]
            named = {row["id"]: row for row in rows}
            in_order.append(halves(program, model, place, f"order-{repeat}", [named[name] for name in order]))
            sorted_rows = sorted(rows, key=lambda row: row["id"])
            worst.append(halves(program, model, place, f"worst-{repeat}", sorted_rows))
        lengths = {kind: [length for name, length in records(place / "queue-0") if name.startswith(kind)] for kind in QUESTIONS}
    means = {kind: sum(own) / len(own) for kind, own in lengths.items()}
    lines.append(f"{PROMPTS} prompts of {COMPLETIONS} completions, half of {means['short']:.0f} and half of {means['long']:.0f} tokens on average:\n")
    lines.append("| rollout on two ranks | seconds | of the queue's |")
    lines.append("|---|---|---|")
    best = min(queue)
    for name, times in [("with the queue", queue), ("divided in the order of the rows", in_order), ("divided by length, the worst case", worst)]:
        lines.append(f"| {name} | {min(times):.2f} | {min(times) / best:.2f} |")
    print("\n".join(lines))
    if args.page:
        begin, end = "<!-- queue: bench/ranks/queue_of_prompts.py -->\n", "<!-- end of queue -->"
        head, rest = PAGE.read_text().split(begin)
        PAGE.write_text(head + begin + "\n" + "\n".join(lines) + "\n\n" + end + rest.split(end, 1)[1])


if __name__ == "__main__":
    main()
