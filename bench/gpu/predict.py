#!/usr/bin/env python3
"""Predicts times on an H100 from bytes, launches and instructions of the kernels, and writes docs/generated/gpu-results.md.

    python3 bench/gpu/predict.py                    writes the page
    python3 bench/gpu/predict.py count TOOLS        counts the instructions of the kernels again, in instructions.json

TOOLS is a folder with `ptxas` and `nvdisasm`, from the wheels nvidia-cuda-nvcc (13.0.88, since another one compiles otherwise) and
nvidia-cuda-nvdisasm. NVRTC is in target/nvrtc (tools/gpu/fetch_nvrtc). `before` in the file are the kernels that the H100 ran; their times
are in h100/results.jsonl.

The constants below were fitted to those times, so that every one of them is reproduced within 10 % (test_predict.py). What changed
since then is predicted with the same constants. tools/gpu/first-contact/report.py compares its measurements with these predictions.
"""

import collections
import functools
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
INSTRUCTIONS = HERE / "instructions.json"
# An H100, as the data sheet and the check of the card give it.
PROCESSORS, CLOCK = 132, 1.755e9
PEAK = 989e12  # FLOP/s of bf16, for MFU
COPY = 2.945e12  # bytes/s of a copy in its memory
PRODUCTS = 843e12  # FLOP/s of a large bf16 product

# Products of many rows, fitted.
CALLS = 12e-6  # seconds of the host's calls around what is timed alone
RATE = 830e12  # FLOP/s while all multiprocessors work
START = 4e-6  # seconds to start and to end one round of tiles; later rounds overlap
SMALL = 1.22e12  # bytes/s of all kernels of a pass besides products and attention
# Products of few rows, fitted.
ALONE = 19e-6  # seconds of a product timed alone, besides its bytes
IN_CACHE, CACHED = 32e6, 6.5e12  # bytes that stay in the second-level cache between repeats, and bytes/s from there
STREAM = 2.79e12  # bytes/s from memory
FEW = {1: 0.38, 8: 0.94}  # cycles of a multiprocessor for each that `Loop.cycles` counts, with 8 and with 64 rows
PART = 0.09e-6  # seconds to add a part to 512 sums, if parts are loaded one after the other
ROUND = 0.375e-6  # seconds to add up to 16 parts to 512 sums, loaded together
# A decoding step, fitted.
TOKEN = 60e-6  # seconds for upload, launch of the graph and read
TURNS = {"before": 4 * 149, "now": 2 + 2 + 2 + 6}  # loads of a draw that wait for the one before: see `draw`
TURN = 0.27e-6  # seconds of such a load, so that `before` takes 160 µs
KERNEL = 7.6e-6  # seconds of a kernel of a layer besides its bytes
LAUNCH = 1.5e-6  # seconds that a kernel takes longer if the host launches it
# Seconds between the kernels of a graph, which are part of KERNEL: published for an H100 (hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles).
# A kernel that starts early does not take them.
GAP = 1.3e-6
STEP_STREAM = 0.874 * COPY  # bytes/s of the kernels of a step
ROW = 1.0e-6  # seconds of a layer for each row beyond eight, besides products
# Attention, fitted.
FLASH = 0.64  # cycles of a multiprocessor for each that `Loop.cycles` counts
EXPOSED = 1120  # cycles of a step that waits for its own copies
# Operations of the kernels in attention: forward, for queries, for keys and values. One takes 2·keys·width FLOP.
FORWARD, BACKWARD = 2, 3 + 4
ADAMW = 2.25e12  # bytes/s of AdamW on the card
UPDATE_BYTES = {"before": 32, "now": 28}  # bytes of a weight that it moves; it copied the weight first
# A step with `offload_optimizer`, measured one weight at a time, which a run does not do.
LINK, HOST, COPIED, THREADS = 18e9, 120e9, 17.6e9, 0.17  # bytes/s down, in main memory, to the pinned buffer; seconds of threads
# Bytes of main memory that the update of a weight moves: gradient 4, moments 16, master 8, weight 2, its copy to the GPU 4 + 2.
UPDATE = 36
# Kernels of a decoder layer in a decoding step: norm, q|k|v, prompt's keys, own keys, projection, norm, gate|up with its activation,
# down. Rotation and activation were kernels of their own before. crates/gpu/tests/graphs.rs counts them.
KERNELS = {"before": 10, "now": 8}
# The own keys run beside the prompt's, so that one of the two takes no time besides its bytes.
IN_TURN = {"before": 10, "now": 7}
STARTS_EARLY = {"before": False, "now": True}
# Weights travel to the second-level cache while kernels without weights run (AHEAD in crates/gpu/src/linear.rs).
FETCHES_EARLY = {"before": False, "now": True}
AHEAD = 24 << 20  # bytes
# Bytes that a weight takes in memory, with the scales of its group.
BYTES = {"16": 2.0, "8": 1 + 4 / 64, "4": 0.5 + 4 / 64}
# Bytes of a weight's 64 rows in one stage of a product of few rows.
STAGE = {"16": 64 * 128, "8": 64 * 64, "4": 64 * 64}
# Blocks of 128 threads that all multiprocessors run at the same time.
SLOTS = 2 * PROCESSORS
# Kernels whose loops are counted, and the copies of 16 bytes that a thread makes in one turn of the loop.
LOOPS = {
    "linear": {
        f"{kernel}{bits}_{eights}": copies + (x if eights == 1 else 8 * x)
        for kernel in ("few_rows", "few_swiglu")
        for bits, copies, x in (("", 4, 0.5), ("_of_8_bits", 2, 0.5), ("_of_4_bits", 2, 1))
        for eights in (1, 8)
    },
    "attention": {"forward_128": 16, "forward_wide_128": 16, "backward_q_128": 16, "backward_q_narrow_128": 8, "backward_kv_128": 8},
}
# Text that decides the instructions of these kernels.
SOURCES = [f"{file}.cu" for file in LOOPS] + ["prim.cuh"]


class Loop:
    """The main loop of a kernel: instructions of a warp in one turn, by kind."""

    def __init__(self, kernel, kinds):
        self.kernel, self.kinds = kernel, kinds
        self.all, self.registers = kinds["all"], kinds["registers"]
        self.copies = next(loops[kernel] for loops in LOOPS.values() if kernel in loops)

    def cycles(self):
        """Returns cycles that a turn of one warp keeps a multiprocessor busy: four schedulers issue, shared memory is read and filled in
        pieces of 128 bytes, and a product of tensor cores takes 1.55 cycles. Their sum stands for what does not overlap."""
        of = self.kinds.get
        return self.all / 4 + of("LDS", 0) + 4 * (of("LDSM", 0) + self.copies) + 1.55 * of("HMMA", 0)


@functools.cache
def loops():
    """Returns the loops of the kernels before and now."""
    counted = json.loads(INSTRUCTIONS.read_text())
    return {when: {name: Loop(name, kinds) for name, kinds in counted[when].items() if any(name in of for of in LOOPS.values())} for when in KERNELS}


def fingerprint(cuda):
    """Returns a number of the text of the counted kernels in a folder, without comments and spaces."""
    texts = [re.sub(r"//.*", "", (cuda / name).read_text()) for name in SOURCES]
    return hashlib.sha256("".join("".join(texts).split()).encode()).hexdigest()[:16]


def assembled(source, tools):
    """Returns the assembler's report on a file of kernels, and its machine code as text."""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = pathlib.Path(folder, "kernels.ptx"), pathlib.Path(folder, "kernels.cubin")
        compiler = [sys.executable, ROOT / "tools/gpu/ptx/nvrtc.py", ROOT / "target/nvrtc", source]
        ptx.write_bytes(subprocess.run(compiler, check=True, stdout=subprocess.PIPE).stdout)
        report = subprocess.run([tools / "ptxas", "-v", "-arch=sm_90a", ptx, "-o", cubin], check=True, capture_output=True, text=True).stderr
        code = subprocess.run([tools / "nvdisasm", "-c", cubin], check=True, stdout=subprocess.PIPE, text=True).stdout
        return report, code


def counted(cuda, tools):
    """Returns the instructions in the loops of the kernels in a folder, and the registers and spilled bytes of each kernel."""
    found = {}
    for file, kernels in LOOPS.items():
        report, code = assembled(cuda / f"{file}.cu", tools)
        parts = re.split(r"Compiling entry function '(\w+)'", report)
        limits = {name: (re.search(r"Used (\d+) registers", text)[1], re.search(r"(\d+) bytes spill stores", text)[1]) for name, text in zip(parts[1::2], parts[2::2])}
        for section in re.split(r"^\.text\.", code, flags=re.M)[1:]:
            name = re.match(r"\w+", section)[0]
            if name in kernels:
                registers, spilled = map(int, limits[name])
                found[name] = {**main_loop(section), "registers": registers, "spilled": spilled}
    return found


def main_loop(section):
    """Returns the number of instructions of each kind in the longest loop that has products of tensor cores. Loops inside it, in which the
    earlier kernels copied, count once."""
    labels, code = {}, []
    for line in section.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(instruction[1])
    best = []
    for i, text in enumerate(code):
        back = re.search(r"BRA.*?(\.L_x_\d+)", text)
        if back and labels.get(back[1], i + 1) <= i:
            body = code[labels[back[1]] : i + 1]
            if len(body) > len(best) and any("HMMA" in one for one in body):
                best = body
    kinds = collections.Counter(re.sub(r"^@!?U?P\w+\s+", "", one).split()[0].split(".")[0] for one in best)
    return {"all": len(best), **{kind: kinds[kind] for kind in ("HMMA", "LDSM", "LDS") if kinds[kind]}}


def product(rows, n, k, split=False):
    """Returns seconds of a product of cuBLASLt on the card. With few tiles, it uses some of the multiprocessors, or if it may split k, a
    second kernel adds the parts."""
    rounds = -(-rows // 128) * -(-n // 128) / PROCESSORS
    kernels = 2 if split and rounds < 1 else 1
    used = 1 if split else min(1, rounds)
    return kernels * START * min(max(1, rounds), 2.5) + 2 * rows * n * k / RATE / used


def product_back(rows, n, k):
    """Returns seconds of both gradients of a product."""
    return product(rows, k, n, True) + product_of_weight(rows, n, k)


def product_of_weight(rows, n, k):
    """Returns seconds of the gradient of a weight, which is added to f32 numbers."""
    return product(n, k, rows, True) + 8 * n * k / COPY


def parts_of(tiles, k):
    """Returns the number of parts of a sum in a product of few rows, as crates/gpu/src/linear.rs does."""
    pieces = -(-k // 128)
    each = -(-pieces // max(1, min(SLOTS // tiles, pieces, 16)))
    return -(-pieces // each)


def loop_of(when, rows, bits="16", activation=False):
    """Returns the loop of a product of few rows, with the activation of gate and up in the same kernel if there is one."""
    kernel = "few_swiglu" if activation and when == "now" else "few_rows"
    return loops()[when][f"{kernel}{'' if bits == '16' else f'_of_{bits}_bits'}_{1 if rows <= 8 else 8}"]


def early(when, n, k, bits):
    """Returns the bytes of a weight that travel to the chip while a kernel without weights runs: to shared memory, three stages of each
    block, and to the second-level cache."""
    tiles = -(-n // 64)
    room = AHEAD + 3 * STAGE[bits] * tiles * parts_of(tiles, k)
    return min(BYTES[bits] * n * k, room, kernel(when) * STEP_STREAM) if FETCHES_EARLY[when] else 0


def few_rows(when, rows, n, k, bits="16", stream=STEP_STREAM, activation=False, follows_idle=False):
    """Returns seconds of a product of few rows besides its start: the longer of its bytes and its instructions, and the sum of its parts.
    A kernel that leaves the memory idle may come before it."""
    tiles, loop = -(-n // 64), loop_of(when, rows, bits, activation)
    depth = 128 if bits == "4" else 64
    cycles = FEW[1 if rows <= 8 else 8] * loop.cycles() * 4 * tiles * -(-k // depth)
    parts = parts_of(tiles, k)
    rounds = -(-rows * 64 // 512)
    tail = 0 if parts == 1 else rounds * (PART * parts if when == "before" else ROUND)
    near = early(when, n, k, bits) if follows_idle else 0
    return max((BYTES[bits] * n * k - near) / stream + near / CACHED, cycles / PROCESSORS / CLOCK) + tail


def kernel(when):
    """Returns seconds of a kernel of a step besides its bytes."""
    return KERNEL - GAP * STARTS_EARLY[when]


def draw(when):
    """Returns seconds to draw a token of every row. A block of 256 threads read a row four times, with four loads of 4 bytes in flight
    for each thread. Now 16 blocks read it three times, with eight loads of 16 bytes, and one of them searches its segment; a second kernel
    waits for the first one."""
    return TURNS[when] * TURN + (0 if when == "before" else 2 * kernel(when))


def few_rows_alone(when, rows, n, k):
    """Returns seconds of such a product, timed alone and repeated, so that a small weight stays in the cache."""
    return ALONE + few_rows(when, rows, n, k, stream=CACHED if 2 * n * k <= IN_CACHE else STREAM)


def attention_rates(when, heads=1, ranges=(1 << 20,)):
    """Returns FLOP/s of attention with heads of 128 columns, for ranges of query rows: forward and backward. Two blocks of a multiprocessor
    take eight warps."""
    of = loops()[when]
    # Products of 64 rows with 64 keys and 128 columns in each block.
    flop = 2 * 2 * 64 * 64 * 128
    cycles = lambda name: FLASH * 8 * of[name].cycles()
    waits = EXPOSED if when == "before" else 0
    # A block of the wide form has two tiles of rows. crates/gpu/src/attention.rs decides in the same way.
    narrow, wide = (sum(-(-rows // size) for rows in ranges) for size in (64, 128))
    wide = when == "now" and 3 * wide <= 2 * narrow and heads * wide >= 3 * PROCESSORS
    forward = cycles("forward_wide_128") / 2 if wide else cycles("forward_128")
    backward = cycles("backward_q_128") + 2 * cycles("backward_kv_128") + 3 * waits
    return [PROCESSORS * CLOCK * products * flop / secs for products, secs in ((FORWARD, forward), (BACKWARD, backward))]


class Model:
    """Sizes of a decoder, from its config.json."""

    def __init__(self, name, folder=HERE):
        c = json.loads((folder / name / "config.json").read_text())
        self.name, self.layers, self.h = name, c["num_hidden_layers"], c["hidden_size"]
        d = self.h // c["num_attention_heads"]
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.q, self.kv = self.heads * d, self.kv_heads * d
        self.inner, self.vocab = c["intermediate_size"], c["vocab_size"]
        self.layer = self.h * (2 * self.q + 2 * self.kv) + 3 * self.h * self.inner
        self.weights = self.layers * self.layer + self.vocab * self.h
        # Weights of the language model, of which some models have the embedding and the head apart.
        self.trained = self.weights + (0 if c["tie_word_embeddings"] else self.vocab * self.h)

    def products(self):
        """Returns the outputs and inputs of a layer's weights."""
        h, q, kv, inner = self.h, self.q, self.kv, self.inner
        return [(q, h), (kv, h), (kv, h), (h, q), (inner, h), (inner, h), (h, inner)]

    def joined(self):
        """Returns the outputs and inputs of a layer's products, with q, k and v in one, and gate and up."""
        h, q, kv, inner = self.h, self.q, self.kv, self.inner
        return [(q + 2 * kv, h), (h, q), (2 * inner, h), (h, inner)]

    def pass_products(self, when, rows, backward=True):
        """Returns seconds of a layer's products. The gradients of weights are a product for each weight."""
        shapes = self.products() if when == "before" else self.joined()
        secs = sum(product(rows, n, k) + (product(rows, k, n, True) if backward else 0) for n, k in shapes)
        return secs + (sum(product_of_weight(rows, n, k) for n, k in self.products()) if backward else 0)

    def elementwise(self, when, backward=True):
        """Returns the bytes that kernels besides products and attention move for a token and layer.

        The weights are bf16. The residual stream and its gradient are f32. Other rows are bf16. Before, the input's gradient of a layer was
        f32 if its output's gradient was, or if several products were added.
        """
        h, inner, q, kv = self.h, self.inner, self.q, self.kv
        norms, swiglu, biases, rotation = 2 * 6 * h, 6 * inner, 2 * (q + 2 * kv), 4 * (q + kv)
        forward = norms + biases + rotation + swiglu
        if not backward:
            return forward
        # Norms are computed again. Attention adds over the query heads of a key head.
        back = norms + 16 * q + 4 * kv
        if when == "before":
            # SwiGLU was computed again. The residual's gradient was rounded for each product with it, in two layers.
            back += swiglu + 2 * 2 * 6 * h
            # Gradients of both norms, with those of their weights, and of SwiGLU.
            back += 2 * (16 + 8) * h + 12 * inner
            # Attention: the products of outputs and their gradients, and the rounded gradients.
            back += 6 * q + 6 * q
        else:
            # The norms' gradients leave the residual's gradient in bf16, too. SwiGLU is computed again with its gradient.
            back += 2 * (2 + 14 + 6) * h + 12 * inner + 4 * q
        return forward + back + rotation + biases

    def useful(self, rows, targets):
        """Returns the FLOP of a training pass without attention. Only rows with targets reach the head."""
        return 6 * (self.layers * self.layer * rows + self.vocab * self.h * targets)

    def prefill(self, when, rows):
        """Returns seconds of a prompt."""
        products = self.layers * self.pass_products(when, rows, False)
        attention = self.layers * 2 * rows * rows * self.q / attention_rates(when, self.heads, [rows])[0]
        return products + attention + self.layers * rows * self.elementwise(when, False) / SMALL

    def policy(self, when, prompt, group, tokens):
        """Returns seconds of a forward and backward pass over a packed group."""
        rows, targets = prompt + group * (tokens - 1), group * tokens
        layer = self.pass_products(when, rows)
        # Logits are computed again in the backward pass, and written and read in f32.
        head = 4 * product(targets, self.vocab, self.h) + 8 * targets * self.vocab / COPY
        seen = prompt * prompt / 2 + targets * (prompt + tokens / 2)
        flop = 2 * seen * self.q * self.layers
        forward, backward = attention_rates(when, self.heads, [prompt] + group * [tokens])
        attention = FORWARD * flop / forward + BACKWARD * flop / backward
        return self.layers * layer + head + attention + self.layers * rows * self.elementwise(when) / SMALL

    def cache(self, rows, prompt, tokens):
        """Returns bytes of keys and values that a decoding step reads: the prompt's once, and half of the completions'."""
        return 4 * self.kv * self.layers * (prompt + rows * tokens / 2)

    def moved(self, rows, prompt, tokens, bits="16"):
        """Returns the bytes that a decoding step reads."""
        return BYTES[bits] * self.weights + self.cache(rows, prompt, tokens)

    def layer_step(self, when, rows, bits="16"):
        """Returns seconds of a layer in a decoding step: products, and all else."""
        inner, joined = self.inner, self.joined()
        # Norms come before q|k|v and gate|up, and attention before the projection.
        products = sum(few_rows(when, rows, n, k, bits, activation=n == 2 * inner, follows_idle=k != inner) for n, k in joined)
        return products, IN_TURN[when] * kernel(when) + ROW * max(0, rows - 8)

    def decode(self, when, rows, prompt, tokens, graphs=True, bits="16"):
        """Returns seconds of a decoding step."""
        secs = TOKEN + draw(when) + self.layers * sum(self.layer_step(when, rows, bits))
        secs += few_rows(when, rows, self.vocab, self.h, bits, follows_idle=True) + self.cache(rows, prompt, tokens) / STEP_STREAM
        return secs + (0 if graphs else LAUNCH * (KERNELS[when] * self.layers + 10))

    def adamw(self, when):
        return UPDATE_BYTES[when] * self.trained / ADAMW

    def offloaded(self):
        """Returns seconds of an offloaded update whose parts follow each other: gradients arrive, the CPU updates, weights are copied."""
        return 4 * self.trained / LINK + UPDATE * self.trained / HOST + 2 * self.trained / COPIED + THREADS


def models(folder=HERE):
    """Returns the models whose configurations are in a folder."""
    return [Model("3b", folder), Model("7b", folder)]


def predicted(when, model, what, sizes, of):
    """Returns the seconds of a measurement of crates/rollout/examples/gpu.rs, or None if it has no prediction."""
    prompt, group, tokens = sizes
    rows = of.get("rows")
    match what:
        case "product":
            if "in_turn" in of and rows <= 64:
                return KERNEL + few_rows(when, rows, of["n"], of["k"], stream=STREAM)
            return few_rows_alone(when, rows, of["n"], of["k"]) if rows <= 64 else CALLS + product(rows, of["n"], of["k"])
        case "product, backward":
            return CALLS + product_back(rows, of["n"], of["k"])
        case "attention" | "attention, backward":
            backward = what != "attention"
            flop = (BACKWARD if backward else FORWARD) * rows * rows * model.q
            return CALLS + flop / attention_rates(when, model.heads, [rows])[backward]
        case "prefill":
            return model.prefill(when, rows)
        case "decode" | "decode, launched one by one":
            return model.decode(when, rows, prompt, tokens, what == "decode")
        case "policy":
            return model.policy(when, prompt, group, tokens)
        case "optimizer":
            return model.adamw(when)
        case "optimizer, offloaded":
            return model.offloaded()


def measured():
    """Returns the model, name, sizes and values of the measurements on the H100 that have a prediction. A first prefill has none: it copies
    the weights from pageable memory, at rates from 5 to 9 GB/s in the same hour."""
    of, seen = {model.name: model for model in models()}, set()
    for line in (HERE / "h100/results.jsonl").read_text().splitlines():
        one = json.loads(line)
        if one["name"] != "measured" or not {"secs", "median_secs"} & one["is"].keys():
            continue
        key = (one["model"], tuple(one["sizes"]))
        if one["what"] == "prefill" and key not in seen:
            seen.add(key)
            continue
        yield of[one["model"]], one["what"], one["sizes"], one["is"]


def reproduced():
    """Returns the prediction of each measurement divided by its time. Weights of one shape share a mean, since their times differ by up to
    5 % from each other."""
    groups = collections.defaultdict(list)
    for model, what, sizes, of in measured():
        key = (model.name, what, of.get("rows"), of.get("n"), of.get("k"), sum(sizes) if not of.get("n") else 0)
        groups[key].append((predicted("before", model, what, sizes, of), of.get("secs") or of["median_secs"]))
    return {key: sum(a for a, _ in both) / sum(b for _, b in both) for key, both in groups.items()}


def steps_of_layer():
    """Returns a table of the kernels, bytes, instructions and seconds of a layer in a decoding step."""
    lines = ["| model, rows | | kernels | bytes of weights | instructions of products | products | all else | a layer | a step |", "|---|---|---|---|---|---|---|---|---|"]
    for model, rows in ((models()[0], 8), (models()[0], 64), (models()[1], 8)):
        for when in KERNELS:
            joined = model.joined()
            issued = sum(4 * -(-n // 64) * -(-k // 64) * loop_of(when, rows, activation=n == 2 * model.inner).all for n, k in joined)
            products, rest = model.layer_step(when, rows)
            step = model.decode(when, rows, 1792, 256 if rows == 8 else 64)
            times = " | ".join(f"{secs * 1e6:.0f} µs (est.)" for secs in (products, rest, products + rest))
            lines.append(
                f"| {model.name.upper()}, {rows} | {when} | {KERNELS[when]} | {2 * model.layer / 1e6:.0f} MB | {issued / 1e6:.0f} million | {times} | {step * 1e3:.2f} ms (est.) |"
            )
    return lines


def predictions():
    lines = ["| what | before | now |", "|---|---|---|"]

    def row(what, get):
        lines.append(f"| {what} | " + " | ".join(f"≈ {get(when)} (est.)" for when in KERNELS) + " |")

    for model in models():
        for rows, tokens in ((8, 256), (64, 64)):
            row(f"{model.name.upper()}, decoding step of {rows} rows", lambda when: f"{model.decode(when, rows, 1792, tokens) * 1e3:.2f} ms")
        for bits in ("8", "4"):
            row(f"{model.name.upper()}, decoding step of 8 rows, weights of {bits} bits", lambda when: f"{model.decode(when, 8, 1792, 256, bits=bits) * 1e3:.2f} ms")
        share = lambda when: model.useful(3832, 2048) / model.policy(when, 1792, 8, 256) / PEAK
        row(f"{model.name.upper()}, pass over 1,792 + 8 × 256 tokens", lambda when: f"{model.policy(when, 1792, 8, 256) * 1e3:.0f} ms, MFU {share(when):.0%}")
    for i, what in enumerate(("forward, many rows", "backward")):
        row(f"attention, heads of 128 columns, {what}", lambda when: f"{attention_rates(when)[i] / 1e12:.0f} TFLOP/s")
    return lines


# The gated delta rule of Qwen3.5 (crates/gpu/cuda/delta.cu), not fitted: products of 64×64×32 go through slabs in shared memory. A warp
# takes 48 products of tensor cores, and about 20 instructions for each of the 32 numbers that a thread splits.
SLAB = 4 * 48 * 1.55 + 32 * 20
# Cycles of a slab in a block that waits for its own loads: four times for memory of the second level.
SLAB_ALONE = SLAB + 4 * 600
# Slabs of a chunk in a value head of 128×128: forward in all kernels and in `advance`, backward with the forward pass that it repeats.
SLABS, ADVANCE, BACK = 44, 16, 44 + 108


def deltas():
    """Returns a table of the gated delta rule in Qwen3.5's layers that have it."""
    lines = ["| size | layers | states of a step of 64 rows | forward, 1,792 + 8 × 256 tokens | backward | the prompt's states, each way |", "|---|---|---|---|---|---|"]
    for size, layers, heads in (("0.8B", 18, 16), ("4B", 24, 32)):
        states = 64 * layers * 2 * 4 * (heads * 128 * 128 + 3 * (2 * 16 + heads) * 128)
        chunks = (1792 + 8 * 256) // 64
        secs = lambda slabs: layers * chunks * heads * slabs * SLAB / PROCESSORS / CLOCK
        # A block has 64 of 128 columns of a head.
        prompt = layers * 1792 / 64 * ADVANCE / 2 * SLAB_ALONE / CLOCK
        times = " | ".join(f"≈ {1e3 * one:.1f} ms (est.)" for one in (secs(SLABS), secs(BACK), prompt))
        lines.append(f"| {size} | {layers} | {states / 1e9:.1f} GB, ≈ {1e3 * states / STEP_STREAM:.1f} ms (est.) | {times} |")
    return lines


def page():
    weights = " and ".join(f"{m.weights / 1e9:.2f} billion ({m.name.upper()})" for m in models())
    off = [abs(ratio - 1) for ratio in reproduced().values()]
    return "\n".join(
        [
            "# GPU predictions",
            "",
            "This page predicts what the kernels reach on an H100. Its most important fact: **no card has measured a figure that is marked (est.)**;",
            "[An H100](../gpu-h100.md) has what a card measured.",
            "",
            f"The predictions are for one H100 and Qwen2.5-VL's decoders, with {weights} weights that multiply a token.",
            "[bench/gpu/predict.py](../../bench/gpu/predict.py) computes them from the bytes that a kernel moves, from the number of launches, and from the",
            "instructions that NVIDIA's assembler makes of the kernels ([instructions.json](../../bench/gpu/instructions.json)). Its constants were",
            f"fitted to times that the H100 measured, with earlier kernels (*before* in the tables). In {len(off)} groups, it reproduces the mean of each",
            f"within 10 %: by {sum(off) / len(off):.1%} on average, by {max(off):.1%} at most. About as many constants as kinds of",
            "measurements were fitted, so this checks that the parts add up, not that a change has the predicted effect. First prefills",
            "have no prediction.",
            "",
            *predictions(),
            "",
            f"A kernel of a decoding step costs {KERNEL * 1e6:.1f} µs besides its bytes. One that starts early costs {GAP * 1e6:.1f} µs less, a published gap, and",
            f"attention's two kernels, side by side, cost one. While a norm or attention runs, up to {kernel('now') * STEP_STREAM / 1e6:.0f} MB of the next weights travel to the",
            f"chip, where they are read at {CACHED / 1e12:.1f} TB/s, if all of that time overlaps. Early starts have no other credit.",
            "",
            "## A layer of a decoding step",
            "",
            *steps_of_layer(),
            "",
            "The kernels are: norm, q|k|v, the prompt's keys, the completion's keys, projection, norm, gate|up with its activation, down. A test counts",
            "them.",
            "",
            "## The gated delta rule",
            "",
            *deltas(),
            "",
            "For [Qwen3.5](../qwen3.5.md), from instructions and bytes, with no fitted constant.",
            "",
            "[tools/gpu/first-contact](../../tools/gpu/first-contact/README.md) compares its measurements with these predictions on a GPU.",
            "",
        ]
    )


def main(words):
    if words:
        known = json.loads(INSTRUCTIONS.read_text())
        known["now"] = counted(ROOT / "crates/gpu/cuda", pathlib.Path(words[1]))
        known["sources"] = fingerprint(ROOT / "crates/gpu/cuda")
        INSTRUCTIONS.write_text(json.dumps(known, indent=1) + "\n")
    (ROOT / "docs/generated/gpu-results.md").write_text(page())


if __name__ == "__main__":
    main(sys.argv[1:])
