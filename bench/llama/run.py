"""Compares decoding of one and of eight completions of a prompt with llama.cpp, in tokens per second, with the same random weights.

    cargo build --release -p omnigrpo
    python3 bench/llama/run.py --tokenizer DIR [--work DIR] [--only 3B] [--rounds 3]

README.md describes the inputs of both sides and the measurement. Needs numpy and the packages of llama.cpp's converter.
"""

import argparse
import json
import os
import re
import runpy
import shutil
import struct
import subprocess
import sys
import tarfile
from datetime import date
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
NEW_TOKENS = 64
COUNTS = (1, 8)
# Published widths of Qwen2's language models; other settings are those of Qwen2.5-VL-3B.
SIZES = {
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, mrope=[8, 12, 12]),
    "3B": dict(mrope=[16, 24, 24]),
}
# Weights -> flags of omnigrpo, type of llama-quantize, further arguments for it.
HEAD = ["--token-embedding-type", "bf16"]
KINDS = {
    "bf16": ([], None, []),
    "8 bits": (["--load_in_8bit"], "Q8_0", []),
    "8 bits, head bf16": (["--load_in_8bit"], "Q8_0", HEAD),
    "4 bits": (["--load_in_4bit"], "Q4_0", []),
    "4 bits, head bf16": (["--load_in_4bit"], "Q4_0", HEAD),
}
PROMPT = " ".join(str(number) + " apples and" for number in range(2, 60))


def call(*words, **more):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, **more)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\nended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def llama(work, threads):
    """Returns source and programs of llama.cpp, from the source package of its Python binding; builds them once for this CPU."""
    found = list(work.glob("llama_cpp_python-*/vendor/llama.cpp"))
    if not found:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
        call(*pip, "-d", work, "llama-cpp-python==0.3.36")
        with tarfile.open(next(work.glob("llama_cpp_python-*.tar.gz"))) as archive:
            archive.extractall(work, filter="data")
        found = list(work.glob("llama_cpp_python-*/vendor/llama.cpp"))
    build = work / "build"
    if not (build / "bin/llama-batched-bench").is_file() or not (build / "bin/llama-quantize").is_file():
        off = [f"-DLLAMA_{name}=OFF" for name in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_SERVER", "CURL", "OPENSSL")]
        call("cmake", "-S", found[0], "-B", build, "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *off)
        call("cmake", "--build", build, "-j", threads, "--target", "llama-batched-bench", "llama-quantize")
    return found[0], build / "bin"


def tensors(config):
    """Returns names and shapes of the language model, and of the tower."""
    d, wide, depth = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    kv = config["num_key_value_heads"] * (d // config["num_attention_heads"])
    language = {"model.embed_tokens.weight": [config["vocab_size"], d], "model.norm.weight": [d]}
    for layer in range(depth):
        at = f"model.layers.{layer}."
        for name, rows in (("q", d), ("k", kv), ("v", kv)):
            language[f"{at}self_attn.{name}_proj.weight"] = [rows, d]
            language[f"{at}self_attn.{name}_proj.bias"] = [rows]
        language |= {
            f"{at}self_attn.o_proj.weight": [d, d], f"{at}mlp.gate_proj.weight": [wide, d], f"{at}mlp.up_proj.weight": [wide, d],
            f"{at}mlp.down_proj.weight": [d, wide], f"{at}input_layernorm.weight": [d], f"{at}post_attention_layernorm.weight": [d],
        }
    v = config["vision_config"]
    w, inner, merged = v["hidden_size"], v["intermediate_size"], v["hidden_size"] * v["spatial_merge_size"] ** 2
    tower = {
        "visual.patch_embed.proj.weight": [w, 3, v["temporal_patch_size"], v["patch_size"], v["patch_size"]],
        "visual.merger.ln_q.weight": [w], "visual.merger.mlp.0.weight": [merged, merged], "visual.merger.mlp.0.bias": [merged],
        "visual.merger.mlp.2.weight": [d, merged], "visual.merger.mlp.2.bias": [d],
    }
    for block in range(v["depth"]):
        at = f"visual.blocks.{block}."
        shapes = {"attn.qkv": [3 * w, w], "attn.proj": [w, w], "mlp.gate_proj": [inner, w], "mlp.up_proj": [inner, w],
                  "mlp.down_proj": [w, inner]}
        for name, shape in shapes.items():
            tower |= {f"{at}{name}.weight": shape, f"{at}{name}.bias": shape[:1]}
        tower |= {f"{at}norm1.weight": [w], f"{at}norm2.weight": [w]}
    return language, tower


def write_weights(path, shapes, rng):
    """Writes a safetensors file of normal numbers in bf16, some megabytes at a time; weights of norms are ones."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = dict(dtype="BF16", shape=shape, data_offsets=[at, at + size])
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            left = int(np.prod(shape))
            while left:
                count = min(left, 1 << 22)
                norm = "norm" in name or "ln_q" in name
                values = np.ones(count, "<f4") if norm else rng.standard_normal(count, dtype="<f4") * np.float32(0.02)
                # Round to the nearest bf16 number; none of these is large enough to overflow.
                out.write(((values.view("<u4") + 0x8000) >> 16).astype("<u2").tobytes())
                left -= count


def checkpoints(work, size, tokenizer):
    """Writes the same language model twice: for omnigrpo as a Qwen2.5-VL with a tower of two blocks, which text does not use, and
    for llama.cpp as plain Qwen2."""
    ours, theirs = work / size / "ours", work / size / "theirs"
    if (ours / "model.safetensors.index.json").is_file():
        return ours, theirs
    shutil.rmtree(work / size, ignore_errors=True)
    (work / size).mkdir()
    runpy.run_path(str(ROOT / "bench/sizes/run.py"))["checkpoint"](ours, "3B", tokenizer)
    config = json.loads((ours / "config.json").read_text())
    changes = dict(SIZES[size])
    config |= {"rope_scaling": {"type": "mrope", "mrope_section": changes.pop("mrope")}, **changes}
    config["vision_config"] |= dict(depth=2, fullatt_block_indexes=[1], out_hidden_size=config["hidden_size"])
    (ours / "config.json").write_text(json.dumps(config))
    theirs.mkdir()
    left_out = ("vision_config", "rope_scaling", "vision_start_token_id", "vision_end_token_id", "vision_token_id", "image_token_id",
                "video_token_id")
    plain = {key: value for key, value in config.items() if key not in left_out}
    plain |= dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    (theirs / "config.json").write_text(json.dumps(plain))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, theirs)
    rng, where = np.random.default_rng(1), {}
    for name, shapes in zip(("language.safetensors", "tower.safetensors"), tensors(config)):
        write_weights(ours / name, shapes, rng)
        where |= dict.fromkeys(shapes, name)
    (theirs / "model.safetensors").symlink_to("../ours/language.safetensors")
    # Written last, so that a directory with this file is complete.
    (ours / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=where)))
    return ours, theirs


def run_ours(binary, model, count, words, threads, work):
    """Returns tokens per second while decoding, and the tokens of the prompt."""
    rows, out = work / "rows.jsonl", work / "out.jsonl"
    rows.write_text(json.dumps(dict(id="0", problem=PROMPT, solution="1")) + "\n")
    out.unlink(missing_ok=True)
    # The first token is drawn from the prompt's last row; decoding gives the others.
    length = NEW_TOKENS + 1
    shown = call(
        binary, "generate", "--model_name_or_path", model, "--input", rows, "--output", out, "--num_generations", count,
        "--min_completion_length", length, "--max_completion_length", length, "--threads", threads, "--profile", *words,
    )
    row = json.loads(out.read_text())
    lengths = [len(completion["completion_ids"]) for completion in row["completions"]]
    assert lengths == [length] * count, lengths
    secs = float(re.search(r"^decode +([0-9.]+)", shown, re.M)[1])
    return count * NEW_TOKENS / secs, row["prompt_tokens"]


def run_theirs(programs, model, prompt_tokens, threads):
    """Returns tokens per second while decoding, by number of completions, with the faster cache layout for each."""
    best = {}
    for layout, room in (("--kv-unified", 1), ("--no-kv-unified", max(COUNTS))):
        # Room for each sequence, a multiple of 256.
        context = room * (-(-(prompt_tokens + 1 + NEW_TOKENS * (max(COUNTS) if room == 1 else 1)) // 256) * 256)
        shown = call(
            programs / "llama-batched-bench", "-m", model, "-c", context, "-npp", prompt_tokens, "-ntg", NEW_TOKENS, "-npl",
            ",".join(map(str, COUNTS)), "-pps", layout, "-t", threads, "-tb", threads, "-ngl", 0, "--output-format", "jsonl",
        )
        for line in shown.splitlines():
            if line.startswith("{"):
                line = json.loads(line)
                best[line["pl"]] = max(best.get(line["pl"], 0), line["speed_tg"])
    assert set(best) == set(COUNTS), shown
    return best


def machine():
    info = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", info)[1]
    simd = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if re.search(rf"\b{flag}\b", info)]
    return f"{name}, {os.cpu_count()} cores, {', '.join(simd)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json and tokenizer_config.json of a Qwen model")
    parser.add_argument("--binary", type=Path, default=ROOT / "target/release/omnigrpo")
    parser.add_argument("--work", type=Path, default=ROOT / "bench/llama/scratch", help="folder for llama.cpp and, temporarily, the weights: 20 GB")
    parser.add_argument("--only", choices=SIZES)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side, alternately; medians count")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="leave the weights for another run")
    parser.add_argument("--output", type=Path, default=ROOT / "bench/llama/results.md")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    source, programs = llama(args.work, args.threads)
    lines = []
    for size in [args.only] if args.only else SIZES:
        ours, theirs = checkpoints(args.work, size, args.tokenizer)
        plain = args.work / size / "bf16.gguf"
        if not plain.is_file():
            call(sys.executable, source / "convert_hf_to_gguf.py", theirs, "--outtype", "bf16", "--outfile", plain)
        for kind in args.kinds:
            flags, target, words = KINDS[kind]
            model = args.work / size / f"{kind}.gguf" if target else plain
            if target and not model.is_file():
                call(programs / "llama-quantize", *words, plain, model, target, args.threads)
            speeds = {side: {count: [] for count in COUNTS} for side in ("ours", "theirs")}
            for _ in range(args.rounds):
                for count in COUNTS:
                    speed, prompt_tokens = run_ours(args.binary, ours, count, flags, args.threads, args.work)
                    speeds["ours"][count].append(speed)
                for count, speed in run_theirs(programs, model, prompt_tokens, args.threads).items():
                    speeds["theirs"][count].append(speed)
            if target and not args.keep:
                model.unlink()
            for count in COUNTS:
                a, b = (median(speeds[side][count]) for side in ("theirs", "ours"))
                spread = ["–".join(f"{end(speeds[side][count]):.1f}" for end in (min, max)) for side in ("theirs", "ours")]
                lines.append(f"| {size} | {kind} | {count} | {a:.1f} ({spread[0]}) | {b:.1f} ({spread[1]}) | {b / a:.2f} |")
                print(lines[-1], flush=True)
        if not args.keep:
            shutil.rmtree(args.work / size)
    version = call(args.binary, "--version").strip()
    package = next(args.work.glob("llama_cpp_python-*/vendor")).parent.name.replace("_", "-")
    args.output.write_text(
        f"# Tokens per second while decoding, compared with llama.cpp\n\n{date.today()}, {machine()}; {args.threads} threads. {version}; llama.cpp of "
        f"{package}.\nOne prompt of {prompt_tokens} tokens, {NEW_TOKENS} decoded tokens of each completion. Medians of {args.rounds} runs, "
        "alternating, with the slowest and fastest in brackets.\n\n"
        "| model | weights | completions | llama.cpp | omnigrpo | ratio |\n|---|---|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
