#!/usr/bin/env python3
"""Writes the tables of docs/scale.md that follow from formulas: memory of a rank, bytes that it sends, and the time of a step.

    tools/ranks/cost.py [--check]

With `--check`, it writes nothing and fails if the page differs. The formulas are those of the page. The rates in STATED
are from data sheets.
"""

import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/scale.md"
GB = 1e9

# Trained weights of the language model and the projector, frozen weights of the tower, layers, width, width of the keys, inner width.
MODELS = {
    "7B": (7.62e9, 0.68e9, 28, 3584, 512, 18944),
    "72B": (72.7e9, 0.68e9, 80, 8192, 1024, 29568),
}
RANKS = [1, 8, 64]
# Model whose exchange the page shows.
SHOWN = "7B"
LORA_RANK = 64
# Work of a rank in a step: prompts, completions of each, tokens of a prompt and of a completion.
PROMPTS, GROUP, PROMPT, ANSWER = 4, 8, 1000, 256
STREAM_ROWS = 4096

# H100 SXM: bf16 without sparsity, memory, NVLink in one direction. Part of these rates that a good step reaches.
STATED = {"flops": 989e12 * 0.4, "memory": 3.35e12 * 0.7, "nvlink": 450e9 * 0.8, "network": 50e9 * 0.8}


def lora(layers, width, kv, inner):
    """Returns the number of adapter weights on all linear layers."""
    return LORA_RANK * layers * (2 * 2 * width + 2 * (width + kv) + 3 * (width + inner))


SHARDS = ["none", "optimizer", "gradients", "weights"]


def sent(trained, weight_bytes, frozen, shard, ranks):
    """Returns the bytes that a rank sends in a step with one micro-batch per rank.

    Gradients in f32, then their sums, or the updated weights if the state is cut. Weights that are cut are sent for the rollout, for the
    forward and for the backward pass, and those of the reference for its pass. `frozen` is as in `ways`.
    """
    each = {"none": 8, "optimizer": 4 + weight_bytes, "gradients": 4 + weight_bytes, "weights": 4 + 3 * weight_bytes}[shard]
    # The reference of adapters is the base.
    gathers = 2 * (4 * frozen["base"] + frozen["reference"]) if shard == "weights" else 0
    return (trained * each + gathers) * (ranks - 1) / ranks


def held(trained, weight_bytes, frozen, shard, ranks, working):
    """Returns the bytes of a rank: weights, gradients, moments, masters of bf16 weights, frozen bf16 weights, and the work of a step.

    `frozen` is as in `ways`. `working` has the bytes of the activations of an
    update, and of the cache of completions in a rollout.
    """
    state = 12 if weight_bytes == 2 else 8
    stage = SHARDS.index(shard)
    part = lambda first: 1 / ranks if stage >= first else 1
    lasting = state * trained * part(1) + 2 * (frozen["tower"] + frozen["reference"] * part(3))
    update = lasting + 4 * trained * part(2) + (weight_bytes * trained + 2 * frozen["base"]) * part(3) + working[0]
    rollout = lasting + weight_bytes * trained + 2 * frozen["base"] + working[1]
    return max(update, rollout)


def ways(name):
    """Returns what is trained: its name, number of weights, their bytes, and the numbers of frozen bf16 weights."""
    weights, tower, layers, width, kv, inner = MODELS[name]
    adapters = lora(layers, width, kv, inner)
    return [
        ("all", weights, 2, {"base": 0, "reference": weights, "tower": tower}),
        ("LoRA", adapters, 4, {"base": weights, "reference": 0, "tower": tower}),
    ]


def work(layers, width, kv):
    """Returns the bytes of the activations of an update that recomputes them, and of the cache of completions."""
    activations = layers * STREAM_ROWS * width * 2 + STREAM_ROWS * width * 2 * 40
    cache = PROMPTS * (PROMPT + GROUP * ANSWER) * layers * 2 * 2 * kv
    return activations, cache


def tokens():
    return PROMPTS * (PROMPT + GROUP * ANSWER)


def flops(weights, trains_all):
    """Returns the operations of a rank in a step, without decoding: policy with recomputation, reference, prefill."""
    policy = 8 if trains_all else 6
    return (policy + 2) * weights * tokens() + 2 * weights * PROMPTS * PROMPT


def memory_table():
    yield "| model | trained | `--shard` | 1 rank | 8 | 64 |"
    yield "|---|---|---|---|---|---|"
    for name, (_, _, layers, width, kv, _) in MODELS.items():
        for what, trained, size, frozen in ways(name):
            # The state of adapters is small, so parts of it save little.
            for shard in SHARDS if size == 2 else ["none", "weights"]:
                each = [held(trained, size, frozen, shard, n, work(layers, width, kv)) / GB for n in RANKS]
                yield f"| {name} | {what} | {shard} | " + " | ".join(f"{x:.0f}" for x in each) + " |"


def wire_table():
    yield "| trained | `--shard` | ranks | GB sent by a rank | s on cards | s on the link | share |"
    yield "|---|---|---|---|---|---|---|"
    all_weights = MODELS[SHOWN][0]
    for what, trained, size, frozen in ways(SHOWN):
        # Adapters in f32 have the same exchange with each of the first three.
        for shard in SHARDS if size == 2 else ["none", "weights"]:
            for ranks in RANKS[1:]:
                bytes_sent = sent(trained, size, frozen, shard, ranks)
                link = STATED["nvlink"] if ranks <= 8 else STATED["network"]
                compute = flops(all_weights, what == "all") / STATED["flops"]
                compute += ANSWER * 2 * all_weights / STATED["memory"]
                secs = bytes_sent / link
                share = 100 * secs / (secs + compute)
                yield f"| {what} | {shard} | {ranks} | {bytes_sent / GB:.1f} | {compute:.1f} | {secs:.2f} | {share:.0f} % |"


TABLES = {"memory": memory_table, "wire": wire_table}


def main():
    text = PAGE.read_text()
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: tools/ranks/cost.py -->\n", f"<!-- end of {name} -->"
        head, rest = text.split(begin)
        _, tail = rest.split(end, 1)
        text = head + begin + "\n" + "\n".join(table()) + "\n\n" + end + tail
    if "--check" in sys.argv[1:]:
        if text != PAGE.read_text():
            sys.exit(f"{PAGE} is out of date: run tools/ranks/cost.py")
        print("cost: the tables of docs/scale.md follow from the formulas")
    else:
        PAGE.write_text(text)


main()
