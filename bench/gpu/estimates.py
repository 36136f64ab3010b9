#!/usr/bin/env python3
"""Estimates the speed on a GPU from formulas, and writes docs/gpu-results.md from them.

    python3 bench/gpu/estimates.py

tools/gpu/first-contact/report.py compares its measurements with the same formulas.
"""

import heapq
import json
import pathlib

HERE = pathlib.Path(__file__).resolve().parent
# Rates of one H200, for the estimates. Other programs reached the first three on such a GPU.
PRODUCTS = 700e12  # FLOP/s of cuBLASLt at these shapes, bf16
COPY = 4.3e12  # bytes/s of a copy
READ = 0.85 * 4.8e12  # bytes/s that kernels which read weights reach
ATTENTION = 250e12  # FLOP/s of our attention: a guess from FlashAttention-2, which has the same instructions
# Products of tensor cores in attention: 2 forward, 3 for queries, 4 for keys and values. A product takes 2·keys·q FLOP.
ATTENTION_PRODUCTS = 2 + 3 + 4
PEAK = 989e12  # FLOP/s of the data sheet, for MFU
KERNEL = 1.0e-6  # seconds between kernels of a graph: a guess
LAUNCH = 2.0e-6  # seconds between kernels that the host launches one by one
TOKEN = 20e-6  # seconds for upload, launch of the graph and read: a guess
# Kernels of a decoder layer in a decoding step: norm, q|k|v, rotation, prompt's keys, own keys, projection, norm, gate|up, activation,
# down. crates/gpu/tests/graphs.rs counts them.
KERNELS = 9
# Bytes that a weight takes in memory, with the scales of its group.
BYTES = {"16": 2.0, "8": 1 + 4 / 64, "4": 0.5 + 4 / 64}
# A step with `offload_optimizer`. All rates of the host are guesses, except for that of a core.
LINK = 25e9  # bytes/s of pinned memory over PCIe 4 with 16 lanes
PAGEABLE = 6e9  # bytes/s of pageable memory over the same link
HOST = 200e9  # bytes/s of main memory: two thirds of eight channels of DDR5-4800
CORES = 16
# Weights/s that one core updates: `cargo bench -p omnigrpo-kernels -- "adamw of bf16"` on the machine of the tests, divided by its cores.
CORE = 327e6
# Bytes of main memory that the update of a weight moves: gradient 4, moments 16, master 8, weight 2, its copy to the GPU 4 + 2.
UPDATE = 36
# Blocks of 128 threads that 132 multiprocessors run at the same time.
SLOTS = 264


def busy(work):
    """Returns the fraction of the slots' time in which they are busy, if each block starts, in order, in the first free slot."""
    slots = [0] * SLOTS
    for one in work:
        heapq.heapreplace(slots, slots[0] + one)
    return sum(work) / SLOTS / max(slots)


def queries_of(prompt, group, tokens):
    """Returns the number of queries that see each tile of 64 keys, for one prompt and its completions."""
    tiles = []
    for at in range(0, prompt + group * tokens, 64):
        of_prompt = max(0, prompt - at) + group * tokens if at < prompt else 0
        ends = [prompt + (g + 1) * tokens for g in range(group)]
        own = [end - max(at, end - tokens) for end in ends if end - tokens < at + 64 and end > at]
        tiles.append(of_prompt or sum(own))
    return tiles


class Model:
    """Sizes of a decoder, from its config.json."""

    def __init__(self, name, folder=HERE):
        c = json.loads((folder / name / "config.json").read_text())
        self.name, self.layers, self.h = name, c["num_hidden_layers"], c["hidden_size"]
        d = self.h // c["num_attention_heads"]
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.q, self.kv = self.heads * d, self.kv_heads * d
        self.inner = c["intermediate_size"]
        layer = self.h * (2 * self.q + 2 * self.kv) + 3 * self.h * self.inner
        self.weights = self.layers * layer + c["vocab_size"] * self.h

    def elementwise(self):
        """Returns the bytes that kernels besides products and attention move for a token and layer in training.

        The weights are bf16. The residual stream and its gradient are f32; so is the input's gradient of a layer whose output's gradient
        is f32. Other rows are bf16.
        """
        h, inner, q, kv = self.h, self.inner, self.q, self.kv
        norms, swiglu, biases, rotation = 2 * 6 * h, 6 * inner, 2 * (q + 2 * kv), 4 * (q + kv)
        forward = norms + biases + rotation + swiglu
        # Norms and SwiGLU are computed again. The residual's gradient is rounded for each product with it, in two layers.
        backward = norms + swiglu + 2 * 2 * 6 * h
        # Gradients of both norms, with those of their weights, and of SwiGLU.
        backward += 2 * (16 + 8) * h + 12 * inner
        # Attention: the products of outputs and their gradients, the rounded gradients, and the sum over the query heads of a key head.
        backward += 6 * q + 6 * q + 16 * q + 4 * kv
        return forward + backward + rotation + biases

    def train(self, visible):
        """Returns seconds per token of a training pass, and its fraction of the peak."""
        products = 6 * self.weights
        secs = products / PRODUCTS + 2 * ATTENTION_PRODUCTS * visible * self.q * self.layers / ATTENTION
        secs += self.elementwise() * self.layers / COPY
        return secs, products / secs / PEAK

    def offload(self):
        """Returns seconds for gradients to arrive and for the update, with the weights on their way at the same time."""
        update = max(UPDATE * self.weights / HOST, self.weights / (CORES * CORE), 2 * self.weights / LINK)
        return 4 * self.weights / LINK, update

    def moved(self, rows, cached, bits="16"):
        """Returns the bytes that a decoding step reads."""
        return BYTES[bits] * self.weights + 4 * self.kv * self.layers * rows * cached

    def decode(self, rows, cached, graphs=True):
        """Returns seconds of a decoding step, and its fraction of the GPU's bandwidth."""
        moved = self.moved(rows, cached)
        secs = moved / READ + KERNELS * self.layers * (KERNEL if graphs else LAUNCH) + TOKEN
        return secs, moved / secs / 4.8e12


def models(folder=HERE):
    """Returns the models whose configurations are in a folder."""
    return [Model("3b", folder), Model("7b", folder)]


def estimates():
    lines = [
        "| what | formula | estimate, 3B | estimate, 7B |",
        "|---|---|---|---|",
    ]

    def row(what, formula, values):
        lines.append(f"| {what} | {formula} | " + " | ".join(f"≈ {value} (est.)" for value in values) + " |")

    for visible in (2048, 8192):
        both = [model.train(visible) for model in models()]
        row(
            f"training pass, {visible} keys seen",
            f"6·W / 700 TFLOP/s + {2 * ATTENTION_PRODUCTS}·keys·q·layers / 250 TFLOP/s + layers·bytes / 4.3 TB/s; MFU = 6·W / time / 989 TFLOP/s",
            [f"{secs * 1e6:.1f} µs a token, MFU {share:.0%}" for secs, share in both],
        )
    for rows, graphs in ((16, True), (64, True), (16, False)):
        both = [model.decode(rows, 1024, graphs) for model in models()]
        between = KERNEL if graphs else LAUNCH
        row(
            f"decoding step, {rows} rows, 1,024 tokens in the cache" + ("" if graphs else ", without a graph"),
            f"(2·W + 4·kv·layers·rows·1024) / (0.85 · 4.8 TB/s) + {KERNELS}·layers · {between * 1e6:.0f} µs + 20 µs",
            [f"{secs * 1e3:.2f} ms, {share:.0%} of 4.8 TB/s" for secs, share in both],
        )
    memory = [f"{16 * model.weights / 1e9:.0f} GB" for model in models()]
    row("weights, gradients, optimizer", "16 bytes · W", memory)
    row("weights, gradients, optimizer with `offload_optimizer`", "6 bytes · W", [f"{6 * m.weights / 1e9:.0f} GB" for m in models()])
    both = [model.offload() for model in models()]
    row(
        "update with `offload_optimizer`, after the last pass at most",
        f"4·W / {LINK / 1e9:.0f} GB/s + max({UPDATE}·W / {HOST / 1e9:.0f} GB/s, W / ({CORES} cores · {CORE / 1e6:.0f} million/s), 2·W / {LINK / 1e9:.0f} GB/s)",
        [f"{arrive:.1f} + {update:.1f} s" for arrive, update in both],
    )
    return lines


def designs():
    """Returns a table of what a launch needs in the current design and in the one before it."""
    lines = ["| what | model | before | now | source |", "|---|---|---|---|---|"]
    for model in models():
        group = model.heads // model.kv_heads
        for sizes in ((1792, 8, 256), (1024, 8, 512)):
            tiles = queries_of(*sizes)
            before = busy([tile * group for _ in range(model.kv_heads) for tile in tiles])
            now = busy([tile for tile in sorted(tiles, reverse=True) for _ in range(model.heads)])
            what = f"slots busy in the backward pass for keys, {sizes[0]} + {sizes[1]} × {sizes[2]}"
            lines.append(f"| {what} | {model.name.upper()} | {before:.0%} | {now:.0%} | simulated |")
    lines.append(f"| kernels of a layer in a decoding step | both | 22 | {KERNELS} | counted |")
    for model in models():
        lines.append(
            f"| kernels of all layers in a decoding step | {model.name.upper()} | {22 * model.layers} | {KERNELS * model.layers} | counted |"
        )
    for model in models():
        for bits in BYTES:
            # Codes were read, and the weights written as bf16 and read again.
            before = BYTES[bits] + (0 if bits == "16" else 4)
            moved = [each * model.weights / 1e9 for each in (before, BYTES[bits])]
            what = f"bytes of weights of {bits} bits in a decoding step"
            lines.append(f"| {what} | {model.name.upper()} | {moved[0]:.1f} GB | {moved[1]:.1f} GB | est. |")
    for model in models():
        own = 4 * model.kv * model.layers * 64 * 256 / 1e9
        group = model.heads // model.kv_heads
        lines.append(
            f"| bytes of own keys and values, 64 rows of 256 tokens, with repeated reads | {model.name.upper()} | {own * group:.1f} GB | {own:.1f} GB | est. |"
        )
    for model in models():
        lines.append(f"| bytes that copy residuals, for a token and layer in training | {model.name.upper()} | {16 * model.h} | 0 | est. |")
        lines.append(
            f"| bytes that add up the query heads' gradients, for a token and layer | {model.name.upper()} | 0 | {16 * model.q} | est. |"
        )
    for model in models():
        # The state traveled in both directions, in pageable memory.
        before, now = 24 * model.weights / PAGEABLE, sum(model.offload())
        lines.append(f"| update with `offload_optimizer` (before: its copies alone) | {model.name.upper()} | {before:.0f} s | {now:.1f} s | est. |")
    lines.append("| passes over the logits of a draw with top-p | both | 71 | 4 if at most 512 tokens share a bin | by hand |")
    return lines


def estimate_page():
    weights = " and ".join(f"{m.weights / 1e9:.2f} billion ({m.name.upper()})" for m in models())
    return "\n".join(
        [
            "**Every figure below is an estimate, marked (est.), with its formula. [gpu-h100.md](gpu-h100.md) has what an H100 measured.**",
            "",
            "# GPU results",
            "",
            f"The estimates are for one H200 and Qwen2.5-VL's decoders. W is the number of weights that multiply a token: {weights}.",
            "q and kv are the widths of all query heads and of all key heads. Other programs reached 700 TFLOP/s, 4.3 TB/s and a fraction of",
            "0.85 on that GPU. Four numbers are guesses: 250 TFLOP/s for attention (FlashAttention-2 uses the same instructions), 1 µs between the",
            "kernels of a CUDA graph, 2 µs between kernels that the host launches one by one, and 20 µs per token for upload, launch and read.",
            f"Kernels besides products and attention move {' and '.join(f'{m.elementwise() / 1e6:.2f} MB ({m.name.upper()})' for m in models())} for a token and layer in training.",
            f"Updates on the CPU: a core updates {CORE / 1e6:.0f} million weights a second, measured on the 2 cores of the machine of the tests. A host with",
            f"{CORES} cores, {HOST / 1e9:.0f} GB/s of main memory and {LINK / 1e9:.0f} GB/s over the link (PCIe 4; {PAGEABLE / 1e9:.0f} GB/s for pageable memory) is assumed.",
            "",
            *estimates(),
            "",
            "The goals are 50 % MFU in training at prompts of 2k and 60 % of the memory's bandwidth in decoding. By these formulas, training",
            f"reaches {models()[0].train(2048)[1]:.0%} with 3B and {models()[1].train(2048)[1]:.0%} with 7B. Decoding reaches its goal with both.",
            "",
            "## The design in numbers",
            "",
            f"Slots are places for blocks: {SLOTS} on an H100 or H200. A simulation starts each block, in order, in the first free slot.",
            "",
            *designs(),
            "",
            "Checked without a GPU:",
            "",
            "- Every kernel equals f64 on an emulator, under several schedules.",
            "- Complete steps, evaluations and rollouts of a tiny model of each family equal the CPU's on that emulator.",
            "- The PTX that NVRTC makes of every kernel passes the same tests on that emulator, also with checks of races, bounds and undefined",
            "  memory ([tools/gpu/ptx](../tools/gpu/ptx/README.md)).",
            "- The host code and the program's commands give the CPU's numbers on stand-ins of CUDA's libraries, which run that PTX",
            "  ([tools/gpu/stand-in](../tools/gpu/stand-in/README.md)).",
            "- All kernels compile for six architectures within bounds of registers and shared memory (`.ci/run nvrtc`).",
            "",
            "Not checked: speed, the behaviour of cuBLASLt, and races finer than a step between barriers.",
            "",
            "[tools/gpu/first-contact](../tools/gpu/first-contact/README.md) creates this page on a GPU.",
            "",
        ]
    )


def main():
    (HERE / "../../docs/gpu-results.md").write_text(estimate_page())


if __name__ == "__main__":
    main()
