#!/usr/bin/env python3
"""Compares the time of a step with a teacher of the policy's size with that of a step with the KL term, whose reference costs the same pass.

    python3 tools/speed/teacher.py target/release/omnigrpo MODEL_DIR

Every run trains the same model on the same rows, with completions of the same length. The runs take turns, and the fastest step of
each counts, since other work on the machine only slows down. Fails if a step with a teacher takes more than 1.05 of the other one.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

MOST = 1.05
COMMON = (
    "--num_generations 8 --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --max_completion_length 32 "
    "--min_completion_length 32 --reward_funcs random --save_strategy no --learning_rate 1e-5 --torch_dtype float32"
).split()
SELF = ["--teacher_prompt_column", "hint"]
KINDS = {
    "the KL term": ["--beta", "0.04"],
    "itself": SELF,
    "itself, jsd over 100 tokens": [*SELF, "--teacher_divergence", "jsd"],
}


def rows(path):
    draw = random.Random(1)
    words = "the of and a to in is that for on with as it at by from this an are or be was one all".split()
    text = lambda count: " ".join(draw.choice(words) for _ in range(count))
    lines = [json.dumps(dict(prompt=text(120), solution="x", hint=text(4))) for _ in range(64)]
    path.write_text("\n".join(lines) + "\n")


def fastest(binary, model, folder, more, steps):
    """Seconds of the fastest step after the first."""
    out = folder / "out"
    flags = ["--model_name_or_path", model, "--train_file", folder / "rows.jsonl", "--output_dir", out, "--max_steps", str(steps)]
    command = [binary, "train", *map(str, flags), *COMMON, *more, "--resume_from_checkpoint", "never"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    read = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return min(step["step_time"] for step in read[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    best = dict.fromkeys(KINDS, float("inf"))
    with tempfile.TemporaryDirectory() as place:
        rows(pathlib.Path(place, "rows.jsonl"))
        for turn in range(args.rounds):
            for number, (name, more) in enumerate(KINDS.items()):
                folder = pathlib.Path(place, f"{turn}-{number}")
                folder.mkdir()
                (folder / "rows.jsonl").symlink_to(pathlib.Path(place, "rows.jsonl"))
                best[name] = min(best[name], fastest(args.binary, args.model, folder, more, args.steps))
    kl = best["the KL term"]
    slow = [name for name, secs in best.items() if secs > MOST * kl]
    for name, secs in best.items():
        print(f"{name}: {secs:.3f} s, {secs / kl:.3f} of a step with the KL term")
    return f"slower than {MOST}: {', '.join(slow)}" if slow else None


if __name__ == "__main__":
    sys.exit(main())
