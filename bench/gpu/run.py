#!/usr/bin/env python3
"""Runs tests and measurements on a GPU and writes the page about them.

    python3 bench/gpu/run.py --estimate            write docs/gpu-results.md from formulas, without a GPU
    python3 run.py BUNDLE --commit HASH [--trl]    on a machine with a GPU and a bundle of `bench/gpu/pack`: run everything, write
                                                   BUNDLE/gpu-results.md and BUNDLE/gpu-results.json

It needs only Python's standard library (`--trl` needs torch, transformers and trl). It builds nothing, so the machine needs no Rust.
"""

import argparse
import datetime
import json
import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
# Sizes of the measurements: prompt tokens, completions, tokens per completion.
SIZES = (1792, 8, 256)

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
# Kernels of a decoder layer in a decoding step.
KERNELS = 22


class Model:
    """Sizes of a decoder, from its config.json."""

    def __init__(self, name, elementwise):
        c = json.loads((HERE / name / "config.json").read_text())
        self.name, self.layers, self.h = name, c["num_hidden_layers"], c["hidden_size"]
        d = self.h // c["num_attention_heads"]
        self.q, self.kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
        layer = self.h * (2 * self.q + 2 * self.kv) + 3 * self.h * c["intermediate_size"]
        self.weights = self.layers * layer + c["vocab_size"] * self.h
        # Bytes that elementwise kernels move for a token and layer, forward and backward.
        self.elementwise = elementwise

    def train(self, visible):
        """Returns seconds per token of a training pass, and its fraction of the peak."""
        products = 6 * self.weights
        secs = products / PRODUCTS + 2 * ATTENTION_PRODUCTS * visible * self.q * self.layers / ATTENTION
        secs += self.elementwise * self.layers / COPY
        return secs, products / secs / PEAK

    def decode(self, rows, cached, graphs=True):
        """Returns seconds of a decoding step, and its fraction of the GPU's bandwidth."""
        moved = 2 * self.weights + 4 * self.kv * self.layers * rows * cached
        secs = moved / READ + KERNELS * self.layers * (KERNEL if graphs else LAUNCH) + TOKEN
        return secs, moved / secs / 4.8e12


MODELS = [Model("3b", 0.34e6), Model("7b", 0.445e6)]


def estimates():
    lines = [
        "| what | formula | estimate, 3B | estimate, 7B |",
        "|---|---|---|---|",
    ]

    def row(what, formula, values):
        lines.append(f"| {what} | {formula} | " + " | ".join(f"≈ {value} (est.)" for value in values) + " |")

    for visible in (2048, 8192):
        both = [model.train(visible) for model in MODELS]
        row(
            f"training pass, {visible} keys seen",
            f"6·W / 700 TFLOP/s + {2 * ATTENTION_PRODUCTS}·keys·q·layers / 250 TFLOP/s + layers·bytes / 4.3 TB/s; MFU = 6·W / time / 989 TFLOP/s",
            [f"{secs * 1e6:.1f} µs a token, MFU {share:.0%}" for secs, share in both],
        )
    for rows, graphs in ((16, True), (64, True), (16, False)):
        both = [model.decode(rows, 1024, graphs) for model in MODELS]
        between = KERNEL if graphs else LAUNCH
        row(
            f"decoding step, {rows} rows, 1,024 tokens in the cache" + ("" if graphs else ", without a graph"),
            f"(2·W + 4·kv·layers·rows·1024) / (0.85 · 4.8 TB/s) + {KERNELS}·layers · {between * 1e6:.0f} µs + 20 µs",
            [f"{secs * 1e3:.2f} ms, {share:.0%} of 4.8 TB/s" for secs, share in both],
        )
    memory = [f"{16 * model.weights / 1e9:.0f} GB" for model in MODELS]
    row("weights, gradients, optimizer", "16 bytes · W", memory)
    row("weights, gradients, optimizer with `offload_optimizer`", "6 bytes · W", [f"{6 * m.weights / 1e9:.0f} GB" for m in MODELS])
    return lines


def estimate_page():
    weights = " and ".join(f"{m.weights / 1e9:.2f} billion ({m.name.upper()})" for m in MODELS)
    return "\n".join(
        [
            "**Nothing here was run on a GPU. Every figure below is an estimate, marked (est.), with its formula.**",
            "",
            "# GPU results",
            "",
            f"The estimates are for one H200 and Qwen2.5-VL's decoders. W is the number of weights that multiply a token: {weights}.",
            "q and kv are the widths of all query heads and of all key heads. Other programs reached 700 TFLOP/s, 4.3 TB/s and a fraction of",
            "0.85 on that GPU. Four numbers are guesses: 250 TFLOP/s for attention (FlashAttention-2 uses the same instructions), 1 µs between the",
            "kernels of a CUDA graph, 2 µs between kernels that the host launches one by one, and 20 µs per token for upload, launch and read.",
            "",
            *estimates(),
            "",
            "The goals are 50 % MFU in training at prompts of 2k and 60 % of the memory's bandwidth in decoding. By these formulas, training",
            f"reaches {MODELS[0].train(2048)[1]:.0%} with 3B and {MODELS[1].train(2048)[1]:.0%} with 7B. Decoding reaches its goal with 7B, and with",
            "3B only at 64 rows.",
            "",
            "Checked without a GPU:",
            "",
            "- Every kernel equals f64 on an emulator, under several schedules.",
            "- Complete steps, evaluations and rollouts of a tiny model of each family equal the CPU's on that emulator.",
            "- The PTX that NVRTC makes of every kernel passes the same tests on that emulator, also with checks of races, bounds and undefined",
            "  memory ([tools/gpu/ptx](../tools/gpu/ptx/README.md)).",
            "- All kernels compile for six architectures within bounds of registers and shared memory ([tools/gpu/nvrtc](../tools/gpu/nvrtc)).",
            "",
            "Not checked: speed, the behaviour of cuBLASLt, and races finer than a step between barriers.",
            "",
            "[bench/gpu/README.md](../bench/gpu/README.md) explains how to create this page on a GPU.",
            "",
        ]
    )


def call(command, log, **more):
    """Runs a command with its output in a file. Returns whether it succeeded."""
    with open(log, "w") as file:
        file.write(f"$ {' '.join(map(str, command))}\n")
        file.flush()
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False, **more)
    print(f"{'ok' if done.returncode == 0 else 'FAILED'}: {log}", flush=True)
    return done.returncode == 0


def tests(bundle, out, environment):
    """Runs the complete suite on the GPU, then under the sanitizer's tools. Returns `{name: passed}`."""
    results = {}
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    for binary in sorted((bundle / "tests").iterdir()):
        threads = ["--test-threads=1"]
        results[binary.name] = call([binary, *threads], out / f"{binary.name}.log", env=environment)
        if not pathlib.Path(sanitizer).exists() or not binary.name.startswith("kernels"):
            continue
        for tool in ("memcheck", "racecheck"):
            name = f"{binary.name}, {tool}"
            command = [sanitizer, "--tool", tool, "--error-exitcode", "9", binary, *threads]
            results[name] = call(command, out / f"{binary.name}-{tool}.log", env=environment)
    return results


def measured(bundle, out, environment):
    """Returns the example's lines for each model."""
    lines = {}
    for model in MODELS:
        log = out / f"{model.name}.jsonl"
        command = [bundle / "gpu", "cuda:0", bundle / model.name, *map(str, SIZES)]
        call(command, log, env=environment)
        text = log.read_text().splitlines()
        lines[model.name] = [json.loads(line) for line in text if line.startswith("{")]
    return lines


def share(secs, of):
    """Returns the lower bound as a fraction of a time."""
    least = max(of.get("flops", 0) / PRODUCTS, of.get("bytes", 0) / COPY)
    return f"{least / secs:.0%}" if least else ""


def page(card, commit, results, lines, trl):
    today = datetime.date.today().isoformat()
    text = [f"Run on {card}, {today}, commit {commit}.", "", "# GPU results", "", "| test | |", "|---|---|"]
    text += [f"| {name} | {'passed' if passed else 'FAILED'} |" for name, passed in results.items()]
    for model in MODELS:
        prompt, group, tokens = SIZES
        text += ["", f"## {model.name.upper()}, {prompt} prompt tokens, {group} × {tokens}", "", "| | rows | ms | lower bound / time | estimate |", "|---|---|---|---|---|"]
        for line in lines[model.name]:
            what, of = line["what"], line["is"]
            secs = of.get("secs", of.get("median_secs"))
            if secs is None:
                continue
            estimate = ""
            if what == "policy":
                guess, mfu = model.train(prompt)
                own = 6 * model.weights * of["rows"] / secs / PEAK
                estimate = f"{guess * of['rows'] * 1e3:.0f} ms, MFU {mfu:.0%}; measured MFU {own:.0%}"
            if what.startswith("decode"):
                guess, band = model.decode(of["rows"], prompt + tokens // 2, what == "decode")
                estimate = f"{guess * 1e3:.2f} ms, {band:.0%} of bandwidth; measured {of['bytes'] / secs / 4.8e12:.0%}"
            name = " ".join(filter(None, [what, of.get("name", "").removeprefix("model.")]))
            text.append(f"| {name} | {of.get('rows', '')} | {secs * 1e3:.3f} | {share(secs, of)} | {estimate} |")
    if trl:
        text += ["", "## TRL on the same GPU", "", "```", trl, "```"]
    return "\n".join(text) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", type=pathlib.Path)
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--trl", action="store_true")
    args = parser.parse_args()
    if args.estimate:
        (HERE / "../../docs/gpu-results.md").write_text(estimate_page())
        return 0
    if args.bundle is None:
        parser.error("give either --estimate or the folder of a bundle")
    bundle = args.bundle.resolve()
    out = bundle / "logs"
    out.mkdir(exist_ok=True)
    # Tests read their data at the path where they were built.
    built = pathlib.Path((bundle / "root").read_text().strip())
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        built.symlink_to(bundle / "tree")
    environment = {**os.environ, "OMNIGRPO_TEST_CARD": "0"}
    smi = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    results = tests(bundle, out, environment)
    lines = measured(bundle, out, environment)
    trl = ""
    if args.trl:
        done = call([sys.executable, bundle / "tree/bench/peer/compare.py", "--workload", "image1"], out / "trl.log")
        trl = (out / "trl.log").read_text()[-2000:] if done else "TRL did not run; see trl.log"
    (bundle / "gpu-results.json").write_text(json.dumps({"tests": results, "lines": lines}, indent=1))
    (bundle / "gpu-results.md").write_text(page(smi.stdout.strip() or "an unknown card", args.commit, results, lines, trl))
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
