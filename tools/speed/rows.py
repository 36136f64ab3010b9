#!/usr/bin/env python3
"""Compares the processor time in which two binaries check the same rows, in one run, and the reports that they write.

    python3 tools/speed/rows.py OLD NEW                      # 20,000 rows of each kind
    python3 tools/speed/rows.py OLD NEW --at_most 0.25       # fails if NEW needs more than a quarter of OLD's time

The binaries take turns, and the best of several runs counts, since other work on the machine only slows down. A report may not
differ. The rows are text alone: pictures are bound by their decoder.
"""

import argparse
import json
import os
import pathlib
import random
import resource
import subprocess
import sys
import tempfile

MODEL = pathlib.Path(__file__).parents[2] / "crates/models/tests/golden/checkpoints/qwen2_5_vl_tied"
WORDS = "the quick brown fox asks how many red green and blue apples remain in a basket near the river after seven are eaten".split()


def sums(k, _):
    return {"problem": f"What is {k} + {k % 7}?", "solution": str(k + k % 7)}


def sentences(k, rng):
    return {"problem": " ".join(rng.choices(WORDS, k=rng.randint(8, 40))) + f" {k}?", "solution": str(k % 97)}


def conversations(k, rng):
    turns = [{"role": "system", "content": "Answer with one number."}]
    for _ in range(rng.randint(0, 2)):
        turns += [{"role": "user", "content": f"And {rng.randint(0, 99)}?"}, {"role": "assistant", "content": str(rng.randint(0, 99))}]
    return {"messages": turns + [{"role": "user", "content": f"Wieviel ist {k} − 1? Größer als 三?"}], "solution": str(k - 1)}


def timed(command, environment):
    """Returns the processor time of a command in seconds, and its output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{command[0]}: status {done.returncode}\n{done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def check(binary, model, rows):
    """Returns the processor time of `data check` in seconds, and its report."""
    command = [binary, "data", "check", "--model", model, "--train_file", rows]
    # Older programs do not ask for the flag that the rows need, which are all text.
    known = subprocess.run([binary, "data", "check", "--help"], capture_output=True).stdout
    command += ["--allow_text_only", "true"] if b"allow_text_only" in known else []
    return timed(command, {"HF_HUB_OFFLINE": "1"})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--model", default=MODEL, help="checkpoint with the tokenizer and the template")
    parser.add_argument("--rows", type=int, default=20_000, help="rows of each kind")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--at_most", type=float, default=1.0, help="largest allowed share of OLD's time, for each kind")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for kind in (sums, sentences, conversations):
            rng = random.Random(1)
            path = pathlib.Path(folder) / f"{kind.__name__}.jsonl"
            path.write_text("".join(json.dumps(kind(k, rng)) + "\n" for k in range(options.rows)))
            runs = [[check(binary, options.model, path) for binary in (options.old, options.new)] for _ in range(options.runs)]
            old, new = (min(run[which][0] for run in runs) for which in (0, 1))
            equal = all(report == runs[0][0][1] for run in runs for _, report in run)
            failed |= not equal or new > options.at_most * old
            print(f"{kind.__name__:>14}: {old:.2f} s and {new:.2f} s, ratio {new / old:.3f}, reports {'equal' if equal else 'DIFFER'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
