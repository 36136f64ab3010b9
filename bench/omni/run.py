"""Compares a GRPO step on one clip with sound (892 media tokens): the group as one sequence, and one sequence per completion.

    cargo build --release -p omnigrpo
    cargo run --release -p omnigrpo-demo --example talking_clips -- runs/talking-data
    python3 bench/omni/run.py --clips runs/talking-data [--binary target/release/omnigrpo] [--threads 2] [--steps 3]

No other trainer packs or even batches this model. The comparison therefore runs this program with `--max_stream_tokens` at the length
of one prompt and one completion: the training passes then process the prompt once per completion, as other trainers do.
Needs only the standard library.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATIONS, COMPLETION = 8, 64


def checkpoint(directory):
    """Writes a configuration with the grids and counts of HumanOmni-0.5B (8 frames of 14×14 patches, 1500 rows of sound) and reduced widths."""
    shutil.copytree(ROOT / "examples/humanomni/model", directory)
    def change(name, **values):
        path = directory / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    change("config.json", hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=4,
           num_key_value_heads=2, max_position_embeddings=4096, num_frames=8, mm_hidden_size=128, initializer_range=0.02)
    change("siglip/config.json", hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
           image_size=224, patch_size=16)
    change("siglip/preprocessor_config.json", size=dict(height=224, width=224))
    change("whisper/config.json", d_model=128, encoder_layers=4, encoder_attention_heads=4, encoder_ffn_dim=512,
           num_mel_bins=128, max_source_positions=1500)
    change("whisper/preprocessor_config.json", feature_size=128, hop_length=160, chunk_length=30, n_fft=400)
    return directory


def run(binary, model, rows, steps, threads, scratch, stream_tokens):
    out = scratch / f"run{stream_tokens or ''}"
    command = [
        binary, "train", "--preset", "humanomni", "--model_name_or_path", model, "--init_weights", "1", "--torch_dtype", "float32",
        "--train_file", rows, "--output_dir", out, "--reward_funcs", "random", "--num_generations", GENERATIONS,
        "--min_completion_length", COMPLETION, "--max_completion_length", COMPLETION, "--gradient_accumulation_steps", 1,
        "--max_steps", steps, "--save_strategy", "no", "--threads", threads, "--skip_data_check",
    ]
    if stream_tokens:
        command += ["--max_stream_tokens", stream_tokens]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "step_time" in line]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clips", type=Path, required=True)
    parser.add_argument("--binary", default=ROOT / "target/release/omnigrpo")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        model = checkpoint(scratch / "model")
        rows = (args.clips / "train.jsonl").resolve()
        packed = run(args.binary, model, rows, args.steps, args.threads, scratch, None)
        prompt = int(packed[0]["num_tokens"]) - GENERATIONS * (COMPLETION - 1)
        single = run(args.binary, model, rows, args.steps, args.threads, scratch, prompt + COMPLETION)
    assert prompt > 892, prompt
    print(f"prompt {prompt} tokens, {GENERATIONS} completions of {COMPLETION}")
    print(f"{'':24}{'one sequence':>14}{'one per completion':>20}")
    def row(name, value):
        a, b = (statistics.median(value(line) for line in lines[1:] or lines) for lines in (packed, single))
        print(f"{name:24}{a:14.4g}{b:20.4g}{b / a if a else 0:8.2f}")
    row("step, s", lambda line: line["step_time"])
    row("tokens in training", lambda line: line["num_tokens"])
    for phase in sorted(key for key in packed[0] if key.startswith("time/")):
        row(phase + ", s", lambda line: line.get(phase, 0.0))


if __name__ == "__main__":
    main()
