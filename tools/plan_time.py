#!/usr/bin/env python3
"""Compares the times that `omnigrpo plan` predicts with those of real runs, for six workloads of different kinds.

    cargo build --release -p omnigrpo
    python3 tools/plan_time.py target/release/omnigrpo [--steps 4] [--only NAME]

Models have random weights and 0.6 to 200 million parameters, in the published layout. `plan` predicts a step with the longest
completions and with half of them; the prediction for the mean length of the run lies on the line through both. The measured time is
the median of all steps but the first, which fills caches. Ends with 1 if a prediction is off by more than a quarter. Needs only the
standard library, and a machine without other work.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "crates/models/tests/golden"
TOLERATED = 0.25

MIDDLE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4}
LARGE = {"hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 10, "num_attention_heads": 10, "num_key_value_heads": 2}
ALL = ["--tune_mm_vision", "true", "--tune_mm_mlp", "true", "--tune_mm_llm", "true"]

# Name, checkpoint, sizes of its decoder, kind of rows, verb, flags.
WORKLOADS = [
    ("tiny model, text, all weights", "qwen2_5_vl_tied", {}, "text", "train",
     "--num_generations 8 --gradient_accumulation_steps 4 --max_completion_length 48 --torch_dtype float32".split() + ALL),
    ("75M, pictures, all weights, KL", "qwen2_5_vl_tied", MIDDLE, "image", "train",
     "--num_generations 6 --gradient_accumulation_steps 2 --max_completion_length 64 --beta 0.04 --torch_dtype float32".split() + ALL),
    ("170M, text, adapters, long completions", "qwen3_vl", LARGE, "text", "train",
     "--num_generations 8 --gradient_accumulation_steps 1 --max_completion_length 256 --torch_dtype bfloat16 --use_peft".split()),
    ("170M, pictures, 8 bits, recomputed", "qwen2_vl_tied", LARGE, "image", "train",
     "--num_generations 8 --gradient_accumulation_steps 1 --max_completion_length 96 --torch_dtype bfloat16 --use_peft "
     "--load_in_8bit --gradient_checkpointing".split()),
    ("75M, clips, two passes over a rollout", "qwen2_5_vl_tied", MIDDLE, "video", "train",
     "--num_generations 4 --gradient_accumulation_steps 2 --max_completion_length 128 --num_iterations 2 --torch_dtype bfloat16 "
     "--use_peft".split()),
    ("170M, supervised, pictures", "qwen3_vl", LARGE, "image", "sft",
     "--gradient_accumulation_steps 4 --torch_dtype bfloat16".split() + ALL),
]


def picture(path, side):
    """Writes a coloured pattern with edges as a PNG."""
    rows = b"".join(
        b"\0" + bytes(v for x in range(side) for v in ((x * y // 97) % 256, (x // 16 * 40 + y) % 256, (x ^ y) % 256))
        for y in range(side)
    )

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def checkpoint(directory, golden, sizes):
    """Writes a checkpoint without weights: a golden one's files, with other sizes."""
    shutil.copytree(GOLDEN / "checkpoints" / golden, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((directory / "config.json").read_text())
    decoder = config.get("text_config", config)
    decoder.update(sizes)
    if sizes:
        width = sizes["hidden_size"] // sizes["num_attention_heads"]
        if "head_dim" in decoder:
            decoder["head_dim"] = width
        half = width // 2
        rope = decoder.get("rope_scaling") or decoder.get("rope_parameters")
        rope["mrope_section"] = [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]
        if "layer_types" in decoder:
            decoder["layer_types"] = ["full_attention"] * sizes["num_hidden_layers"]
        decoder["max_position_embeddings"] = 32768
        # The width of the tower's output is the decoder's; Qwen2-VL calls it hidden_size, and its own width embed_dim.
        vision = config["vision_config"]
        own = "embed_dim" if "embed_dim" in vision else "hidden_size"
        vision["hidden_size" if own == "embed_dim" else "out_hidden_size"] = sizes["hidden_size"]
        vision.update({own: 320, "num_heads": 4})
        if "intermediate_size" in vision:
            vision["intermediate_size"] = 896
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text("{}")
    limits = json.loads((directory / "preprocessor_config.json").read_text())
    if "max_pixels" in limits:
        limits.update(min_pixels=3136, max_pixels=1003520)
        limits.pop("size", None)
        (directory / "preprocessor_config.json").write_text(json.dumps(limits))


def rows(path, kind, count):
    lines = []
    for i in range(count):
        words = " ".join(str(i * j) for j in range(10 + 7 * (i % 5)))
        row = {"id": str(i), "problem": f"Which of {words} is largest?", "solution": "<answer>5</answer>"}
        if kind == "image":
            row["image"] = "picture.png"
        if kind == "video":
            row["video"] = ["frame.png"] * 8
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=4, help="steps of each run")
    parser.add_argument("--verbose", action="store_true", help="also print all phases")
    parser.add_argument("--only", help="workloads whose names contain this")
    args = parser.parse_args()
    binary = args.binary.resolve()
    off = []
    print("| workload | predicted, s | measured, s | ratio | rollout | update | `plan` took, s |")
    print("|---|---|---|---|---|---|---|")
    for name, golden, sizes, kind, verb, flags in WORKLOADS:
        if args.only and args.only not in name:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            scratch = pathlib.Path(scratch)
            checkpoint(scratch / "model", golden, sizes)
            picture(scratch / "picture.png", 336)
            picture(scratch / "frame.png", 224)
            rows(scratch / "rows.jsonl", kind, 64)
            words = ["--model_name_or_path", "model", "--init_weights", "1", "--train_file", "rows.jsonl", "--output_dir", "run",
                     "--max_steps", str(args.steps), "--save_strategy", "no", *flags]
            if verb == "train":
                words += ["--reward_funcs", "random"]
            if kind == "text":
                words += ["--allow_text_only", "true"]

            def start(verb, *more):
                done = subprocess.run([binary, verb, *words, *more], cwd=scratch, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"{name}: {verb}: {done.stderr}")

            begun = time.monotonic()
            start(*(["plan"] if verb == "train" else ["sft", "--dry_run"]), "--json", "plan.json")
            planned = time.monotonic() - begun
            start(verb)
            lengths = json.loads((scratch / "plan.json").read_text())["time"]["with_completions"]
            metrics = [json.loads(line) for line in (scratch / "run/metrics.jsonl").read_text().splitlines()]
            metrics = [line for line in metrics if "step_time" in line][1:]
        share = 1.0
        if len(lengths) > 1:
            mean = statistics.mean(line["completions/mean_length"] for line in metrics)
            most, least = (each["completion_tokens"] for each in lengths)
            share = (mean - least) / (most - least)
        line = lambda f: share * f(lengths[0]) + (1 - share) * f(lengths[-1])  # noqa: E731
        predicted = line(lambda each: each["step_secs"])
        measured = statistics.median(line["step_time"] for line in metrics)
        if "75M, clips" in name:
            # Every other step samples.
            measured = statistics.mean(line["step_time"] for line in metrics[-2 * (len(metrics) // 2):])
        phases = lambda names: line(lambda each: sum(each["phases"].get(name, 0) for name in names))  # noqa: E731
        seen = lambda names: statistics.mean(sum(line.get(f"time/{name}", 0) for name in names) for line in metrics)  # noqa: E731
        parts = [["rollout"], ["encode", "reference", "forward", "backward", "optimizer"]]
        each = " | ".join(f"{phases(names):.2f} of {seen(names):.2f}" for names in parts)
        if args.verbose:
            print({key: round(statistics.mean(line.get(key, 0) for line in metrics), 4) for key in metrics[0] if key.startswith("time/") or key == "step_time"}, lengths)
        print(f"| {name} | {predicted:.2f} | {measured:.2f} | {predicted / measured:.2f} | {each} | {planned:.1f} |", flush=True)
        if abs(predicted / measured - 1) > TOLERATED:
            off.append(name)
    if off:
        sys.exit(f"off by more than {TOLERATED:.0%}: {', '.join(off)}")


if __name__ == "__main__":
    main()
