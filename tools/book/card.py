#!/usr/bin/env python3
"""Makes the tables of docs/guide/a-card.md from `omnigrpo plan`: `card.py PROGRAM`, or `card.py --check`.

Memory and times are those of GPUs that are not opened: the times follow from the rates of the data sheets. A plan needs the sizes of a model and no weights. The configurations are the published ones that the tests of the families hold; the
tokenizers are those of tiny checkpoints, so the ids of special tokens are theirs. The numbers go to docs/guide/card.json.
"""

import json
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from made import ROOT, machine, main

PAGE = ROOT / "docs/guide/a-card.md"
RECORD = ROOT / "docs/guide/card.json"
GOLDEN = ROOT / "crates/models/tests/golden"
# Name for readers, configuration, tiny checkpoint of the family.
MODELS = [
    ("Qwen2-VL-2B", "qwen2_vl_2B", "qwen2_vl_tied"),
    ("Qwen2.5-VL-3B", "qwen2_5_vl_3B", "qwen2_5_vl_tied"),
    ("Qwen2.5-VL-7B", "qwen2_5_vl_7B", "qwen2_5_vl_untied"),
    ("Qwen3-VL-2B", "qwen3_vl_2B", "qwen3_vl"),
    ("Qwen3-VL-4B", "qwen3_vl_4B", "qwen3_vl"),
    ("Qwen3-VL-8B", "qwen3_vl_8B", "qwen3_vl_untied"),
]
# Ways to train, from the most to the least memory.
WAYS = [
    ("all", []),
    ("all, few bits",
     ["--optim", "adamw_8bit", "--grad_dtype", "bfloat16", "--pure_bf16", "--stochastic_rounding", "--gradient_checkpointing"]),
    ("LoRA", ["--use_peft", "--lora_r", "16"]),
    ("LoRA, 4 bits", ["--use_peft", "--lora_r", "16", "--load_in_4bit", "--gradient_checkpointing"]),
]
CARDS = [("rtx-4090", "24GB"), ("l40s", "48GB"), ("h100", "80GB"), ("h200", "141GB")]
SIDE = 448
SETTINGS = ["--init_weights", "1", "--torch_dtype", "bfloat16", "--reward_funcs", "accuracy", "--num_generations", "8",
            "--max_completion_length", "256", "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1",
            "--max_steps", "100", "--max_pixels", "200704"]


def picture(path):
    rows = b"".join(b"\0" + bytes(v for x in range(SIDE) for v in (x % 256, y % 256, (x ^ y) % 256)) for y in range(SIDE))
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    head = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def checkpoint(folder, config, tiny):
    """Sizes of the published model, with the tokenizer and the ids of the tiny one."""
    shutil.copytree(GOLDEN / "checkpoints" / tiny, folder, ignore=shutil.ignore_patterns("*.safetensors*", "expected*"))
    own = json.loads((folder / "config.json").read_text())
    published = json.loads((GOLDEN / "published" / config / "config.json").read_text())
    def ids(to, source):
        for key, value in source.items():
            if key.endswith("token_id") and key in to:
                to[key] = value
            elif isinstance(value, dict) and isinstance(to.get(key), dict):
                ids(to[key], value)
    ids(published, own)
    (folder / "config.json").write_text(json.dumps(published))
    return folder


def plan(program, folder, rows, words):
    path = folder / "plan.json"
    path.unlink(missing_ok=True)
    done = subprocess.run([program, "plan", "--model_name_or_path", str(folder), "--train_file", str(rows), "--json", str(path), *SETTINGS, *words],
                          capture_output=True, text=True)
    if not path.exists():
        raise SystemExit(f"{folder.name} {words}: {done.stderr}")
    return json.loads(path.read_text())


def tables(record):
    """The tables of the page."""
    lines = ["| model | trained | memory, GB | RTX 4090, 24 GB | L40S, 48 GB | H100, 80 GB | H200, 141 GB |", "|---|---|---|---|---|---|---|"]
    for model, ways in record["models"].items():
        for way, cards in ways.items():
            memory = max(own["bytes"] for own in cards.values()) / 1e9
            times = [f"{own['step_secs']:.1f}" if own["fits"] else "no" for own in cards.values()]
            lines.append(f"| {model} | {way} | {memory:.0f} | {' | '.join(times)} |")
    return {"card: tools/book/card.py": "\n".join(lines)}


def measured(program):
    """Returns the record: what `plan` says of each model on each card."""
    scratch = Path(tempfile.mkdtemp())
    try:
        picture(scratch / "one.png")
        rows = scratch / "rows.jsonl"
        rows.write_text("".join(json.dumps({"image": "one.png", "problem": "How many?", "solution": str(n)}) + "\n" for n in range(16)))
        models = {}
        for name, config, tiny in MODELS:
            folder = checkpoint(scratch / config, config, tiny)
            models[name] = {}
            for way, words in WAYS:
                models[name][way] = {}
                for card, memory in CARDS:
                    made = plan(program, folder, rows, [*words, "--device", "cuda", "--gpu_memory", memory, "--gpu_rates", card])
                    longest = made["time"]["with_completions"][0]
                    models[name][way][card] = {"bytes": made["total"], "fits": made["fits"], "step_secs": longest["step_secs"]}
            print(name, flush=True)
    finally:
        shutil.rmtree(scratch)
    return {**machine("python3 tools/book/card.py PROGRAM"), "settings": " ".join(SETTINGS), "models": models}


if __name__ == "__main__":
    sys.exit(main(PAGE, RECORD, tables, measured))
