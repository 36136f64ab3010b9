#!/usr/bin/env python3
"""Compares the memory that `plan` predicts for a card with the allocations that the stand-in counts, and parts of main memory with
what the stand-in and the run count.

    tools/gpu/stand-in/memory.py PROGRAM FOLDER

FOLDER is new. The model is a Qwen2.5-VL with 24 million parameters, all of them 0, since the stand-in counts without computing.
"""

import json
import pathlib
import shutil
import struct
import sys

from verbs import GOLDEN, ROWS, Failure, run

# Largest relative difference.
ALLOWED = 0.05
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2}
# Settings of every workload, which a workload may replace, and its own settings.
STEPS = {
    "threads": 2, "num_generations": 8, "gradient_accumulation_steps": 2, "max_steps": 2, "train_file": "rows.jsonl",
    "reward_funcs": "random", "max_completion_length": 64, "min_completion_length": 64,
}
ADAPTERS, RECOMPUTED, BF16 = {"use_peft": True}, {"gradient_checkpointing": True}, {"torch_dtype": "bfloat16"}
ONE_PASS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
LONG = {"max_completion_length": 256, "min_completion_length": 256}
WORKLOADS = {
    "full": {},
    "full, recomputed": RECOMPUTED,
    "full, offloaded": {"offload_optimizer": True},
    "full, f32, no reference": {"torch_dtype": "float32", "beta": 0},
    "full, bf16": BF16,
    "full, bf16, offloaded, recomputed": BF16 | RECOMPUTED | {"offload_optimizer": True},
    "full, bf16, offloaded, one pass": BF16 | ONE_PASS | {"offload_optimizer": True},
    "adapters": ADAPTERS,
    "adapters on 8 bits": ADAPTERS | {"load_in_8bit": True},
    "adapters on 4 bits, recomputed": ADAPTERS | RECOMPUTED | {"load_in_4bit": True},
    "adapters, long completions": ADAPTERS | RECOMPUTED | LONG | {"beta": 0, "max_stream_tokens": 320},
    "adapters, bf16, many completions": ADAPTERS | RECOMPUTED | BF16 | LONG | {"num_generations": 64, "max_stream_tokens": 640},
}


def shapes(names):
    """Yields the name and shape of each tensor of the larger model, from those of the tiny one."""
    h, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    kv = h // SIZES["num_attention_heads"] * SIZES["num_key_value_heads"]
    of = {
        "q_proj.weight": [h, h], "q_proj.bias": [h], "k_proj.weight": [kv, h], "k_proj.bias": [kv], "v_proj.weight": [kv, h],
        "v_proj.bias": [kv], "o_proj.weight": [h, h], "gate_proj.weight": [inner, h], "up_proj.weight": [inner, h],
        "down_proj.weight": [h, inner], "layernorm.weight": [h], "model.norm.weight": [h], "merger.mlp.2.weight": [h, 64],
        "merger.mlp.2.bias": [h],
    }
    for name, shape in names.items():
        if name == "model.embed_tokens.weight":
            yield name, [shape[0], h]
        elif ".layers.1." in name:
            continue
        else:
            own = None if name.startswith("visual.blocks") else next((of[end] for end in of if name.endswith(end)), None)
            layers = range(SIZES["num_hidden_layers"]) if ".layers.0." in name else [0]
            for layer in layers:
                yield name.replace(".layers.0.", f".layers.{layer}."), own or shape


def write_model(folder):
    """Writes a checkpoint whose weights are 0. The file is sparse."""
    tiny = GOLDEN / "checkpoints/qwen2_5_vl_tied"
    shutil.copytree(tiny, folder)
    config = json.loads((tiny / "config.json").read_text())
    config.update(SIZES)
    config["rope_scaling"]["mrope_section"] = [8, 12, 12]
    config["vision_config"]["out_hidden_size"] = SIZES["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with open(tiny / "model.safetensors", "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    at, tensors = 0, {}
    for name, shape in shapes({name: tensor["shape"] for name, tensor in header.items()}):
        size = 4
        for n in shape:
            size *= n
        tensors[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(tensors).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def compare(program, place, name, settings):
    """Returns the predicted and the counted bytes of a workload."""
    out = name.replace(", ", "-").replace(" ", "-")
    flags = " ".join(f"--{key} {str(value).lower()}" for key, value in (STEPS | settings).items())
    line = f"--model model {flags} --output_dir {out}"
    # The card is not opened for the plan.
    run(program, place, f"plan {line} --gpu_memory 24GB --json {out}.json", "cuda:0")
    plan = json.loads((place / f"{out}.json").read_text())
    _, reports = run(program, place, f"train {line}", "cuda:0", STAND_IN_COMPUTES="0")
    metrics = json.loads((place / out / "metrics.jsonl").read_text().splitlines()[-1])
    main = {"pinned_buffers": reports[0].get("pinned_bytes", 0), "moments_and_masters": 1e6 * metrics["memory/optimizer_mb"]}
    for part, counted in main.items():
        planned = plan["main_memory"]["parts"][part]
        # The weights of few bits are too small here for the buffers of uploads, which the plan always counts.
        unused = part == "pinned_buffers" and counted == 0 and {"load_in_8bit", "load_in_4bit"} & settings.keys()
        if not unused and abs(planned - counted) > ALLOWED * counted:
            raise Failure(f"{part} in main memory: {planned / 1e6:.1f} MB planned, {counted / 1e6:.1f} MB counted")
    return plan, reports[0]["peak_bytes"]


def main():
    program, place = (pathlib.Path(word).resolve() for word in sys.argv[1:3])
    place.mkdir(parents=True)
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    shutil.copy(GOLDEN / "media/shapes.png", place)
    write_model(place / "model")
    failed = 0
    for name, settings in WORKLOADS.items():
        try:
            plan, counted = compare(program, place, name, settings)
        except Failure as failure:
            print(f"memory, {name}: FAILED: {failure}", flush=True)
            failed += 1
            continue
        far = plan["total"] / counted - 1
        failed += abs(far) > ALLOWED
        parts = ", ".join(f"{part} {bytes / 1e6:.1f}" for part, bytes in plan["parts"].items() if bytes)
        main = plan["main_memory"]["total"] / 1e6
        print(
            f"memory, {name}: {plan['total'] / 1e6:.1f} MB planned, {counted / 1e6:.1f} MB counted, {far:+.1%} ({parts}); main memory {main:.1f} MB planned",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
