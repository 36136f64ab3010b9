"""Compares the memory that `omnigrpo plan` predicts with the memory that the run takes: python3 bench/memory/compare.py [PROGRAM [WORKLOAD …]]

Needs the program and Python without packages. Models have random weights and rows are synthetic; every run takes a few updates and less
than two minutes on two cores. The measurement is the largest resident memory of the process. The exit code is 0 if each prediction is
within 15 percent.
"""

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench/learning"))
from small_qwen3_5 import write_checkpoint  # noqa: E402

DEMO = ROOT / "crates/demo/assets/model"
BOUND = 0.15
# Sizes of a language model: width, feed-forward, layers, heads, key-value heads, vocabulary.
SMALL = (512, 1408, 8, 8, 2, 32_000)
MIDDLE = (768, 2048, 12, 12, 4, 48_000)
WORDS = "the red square moves left while one small circle stays where it was and nobody looks at the clock".split()


def checkpoint(place, sizes):
    """Writes a model directory without weights: a Qwen2.5-VL of these sizes with the tokenizer of the demo."""
    shutil.copytree(DEMO, place, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((place / "config.json").read_text())
    hidden, wide, layers, heads, kv, vocab = sizes
    config.update(hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers, num_attention_heads=heads,
                  num_key_value_heads=kv, vocab_size=vocab, max_position_embeddings=32_768, initializer_range=0.02)
    half = hidden // heads // 2
    config["rope_scaling"]["mrope_section"] = [half // 4, half * 3 // 8, half * 3 // 8]
    config["vision_config"].update(hidden_size=256, intermediate_size=512, out_hidden_size=hidden, window_size=112)
    (place / "config.json").write_text(json.dumps(config))


def png(path, side):
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = b"".join(b"\0" + random.randbytes(3 * side) for _ in range(side))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b""))


def rows(place, count, words, medium=None, answer=8):
    """Writes rows with prompts of about `words` words; `medium` is ("image", side) or ("video", side, frames)."""
    lines = []
    for i in range(count):
        row = {"id": str(i), "problem": " ".join(random.choices(WORDS, k=words - random.randrange(words // 8))),
               "solution": " ".join(random.choices(WORDS, k=answer))}
        if medium and medium[0] == "image":
            png(place / f"{i}.png", medium[1])
            row["image"] = f"{i}.png"
        elif medium:
            folder = place / f"clip{i}"
            folder.mkdir()
            for frame in range(medium[2]):
                png(folder / f"{frame:03}.png", medium[1])
            row["video"] = folder.name
        if medium:
            row["problem"] = f"<{medium[0]}>\n{row['problem']}"
        lines.append(json.dumps(row) + "\n")
    (place / "rows.jsonl").write_text("".join(lines))


GRPO = ["--reward_funcs", "random", "--num_generations", "8"]
LONG = dict(sizes=SMALL, rows=(4, 700), verb="train",
            flags=GRPO + ["--max_completion_length", "64", "--gradient_accumulation_steps", "2"])
WORKLOADS = {
    "text, whole model, f32, reference": dict(
        sizes=SMALL, rows=(8, 150), verb="train",
        flags=GRPO + ["--max_completion_length", "96", "--gradient_accumulation_steps", "4", "--beta", "0.04"]),
    "the same, weights in a file": dict(
        sizes=SMALL, rows=(8, 150), verb="train", saved=True,
        flags=GRPO + ["--max_completion_length", "96", "--gradient_accumulation_steps", "4", "--beta", "0.04"]),
    "images, LoRA, bf16": dict(
        sizes=MIDDLE, rows=(4, 60, ("image", 448)), verb="train",
        flags=GRPO + ["--max_completion_length", "48", "--use_peft", "--torch_dtype", "bfloat16",
                      "--gradient_accumulation_steps", "2"]),
    "video, whole model and tower, f32": dict(
        sizes=SMALL, rows=(4, 40, ("video", 224, 12)), verb="train",
        flags=GRPO + ["--max_completion_length", "24", "--gradient_accumulation_steps", "2", "--freeze_vision_modules", "false"]),
    "text, LoRA on 4 bits": dict(
        sizes=MIDDLE, rows=(4, 200), verb="train",
        flags=GRPO + ["--max_completion_length", "32", "--use_peft", "--load_in_4bit", "--torch_dtype", "bfloat16",
                      "--gradient_accumulation_steps", "1"]),
    "Qwen3.5, images, whole model, f32, reference": dict(
        family="qwen3_5", sizes=SMALL, rows=(8, 150, ("image", 224)), verb="train",
        flags=GRPO + ["--max_completion_length", "96", "--gradient_accumulation_steps", "4", "--beta", "0.04"]),
    "Qwen3.5, long text, LoRA on 4 bits": dict(
        family="qwen3_5", sizes=MIDDLE, rows=(4, 700), verb="train",
        flags=GRPO + ["--max_completion_length", "64", "--use_peft", "--load_in_4bit", "--torch_dtype", "bfloat16",
                      "--gradient_accumulation_steps", "1"]),
    "long text, activations kept": LONG,
    "long text, activations recomputed": LONG | dict(flags=LONG["flags"] + ["--gradient_checkpointing"]),
    "supervised, bf16 with masters": dict(
        sizes=MIDDLE, rows=(16, 80, None, 300), verb="sft",
        flags=["--torch_dtype", "bfloat16", "--gradient_accumulation_steps", "8"]),
}


def resident(command, log):
    """Returns the largest resident memory of a command, in bytes."""
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        log.flush()
        sys.exit(f"{' '.join(map(str, command))}\nfailed:\n{Path(log.name).read_text()[-3000:]}")
    return usage.ru_maxrss * 1024


def main():
    program = sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/release/omnigrpo"
    asked = sys.argv[2:] or list(WORKLOADS)
    print("| run | planned, MB | measured, MB | difference |\n|---|---|---|---|", flush=True)
    worst = 0
    for name, work in WORKLOADS.items():
        if not any(part in name for part in asked):
            continue
        random.seed(name)
        with tempfile.TemporaryDirectory() as place:
            place = Path(place)
            if work.get("family") == "qwen3_5":
                write_checkpoint(place / "start", *work["sizes"], initializer_range=0.02, tower=256)
            else:
                checkpoint(place / "start", work["sizes"])
            rows(place, *work["rows"])
            flags = ["--train_file", place / "rows.jsonl", "--allow_text_only", "true", "--device", "cpu", "--save_strategy", "no"] + work["flags"]
            command = [program, work["verb"], *flags, "--model_name_or_path"]
            with open(place / "log", "w") as log:
                model = [place / "start", "--init_weights", "1"]
                if work.get("saved"):
                    resident(command + model + ["--output_dir", place / "saved", "--max_steps", "1"], log)
                    model = [place / "saved"]
                command += model
                resident(command + ["--dry_run", "--json", place / "plan.json"], log)
                plan = json.loads((place / "plan.json").read_text())
                took = resident(command + ["--output_dir", place / "run", "--max_steps", "2"], log)
        difference = plan["total"] / took - 1
        worst = max(worst, abs(difference))
        print(f"| {name} | {plan['total'] / 1e6:.0f} | {took / 1e6:.0f} | {100 * difference:+.0f} % |", flush=True)
        if os.environ.get("PARTS"):
            print({part: round(value / 1e6) for part, value in plan["parts"].items() if value}, flush=True)
    sys.exit(worst > BOUND)


if __name__ == "__main__":
    main()
