#!/usr/bin/env python3
"""Digests of what short runs write: whether a change of the code changed a bit of a result.

    python3 tools/bits/bits.py --binary target/debug/omnigrpo --record before.json
    python3 tools/bits/bits.py --binary target/debug/omnigrpo --check before.json

Trains, fine-tunes, generates and scores with the tiny checkpoints of the tests: every family, f32 and bf16, all weights and
adapters with dropout, quantised bases, recomputed activations, split streams. A digest covers weights, moments, metrics
(without times and memory) and texts. It holds for one kind of CPU: other vector widths give other bits.
"""

import argparse
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "crates/models/tests/golden"
TIMES = ("time", "tokens_per_second", "memory", "seconds", "date", "machine/", "per_second", "speed", "logp_difference/rollout_time")

ROWS = [
    {"id": "shapes", "image": "shapes.png", "problem": "<image>\nWhich shape is red?", "solution": "<answer>circle</answer>"},
    {"id": "two", "image": ["noise.png", "shapes.png"], "problem": "<image>\nand\n<image>\nsame?", "solution": "<answer>no</answer>"},
    {"id": "clip", "video": "clip.gif", "problem": "<video>\nWhich way?", "solution": "<answer>left</answer>"},
    {"id": "text", "problem": "1 + 2?", "solution": "<answer>3</answer>"},
]
HEARING = ("humanomni", "omni", "qwen2_audio")
HEARD = [{"id": "rise", "audio": "rise.wav", "problem": "<audio>\nUp or down?", "solution": "<answer>up</answer>"}]

STEP = ("--num_generations 3 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_steps 2 --save_steps 1 "
        "--max_completion_length 5 --reward_funcs random length --learning_rate 1e-3 --threads 2").split()
# One micro-batch: the step differentiates what its rollout computed.
ONE = " ".join(STEP).replace("accumulation_steps 2", "accumulation_steps 1").split()
ALL = "--tune_mm_vision true --tune_mm_mlp true --tune_mm_llm true".split()
LORA = "--use_lora true --lora_r 4 --lora_alpha 8 --lora_dropout 0.2".split()


def reads_text_only(model):
    return "vision" not in (GOLDEN / "checkpoints" / model / "config.json").read_text()


def cases(names):
    """(name, verb, checkpoint, flags)"""
    for m in names:
        whole = ALL[4:] if reads_text_only(m) else ALL
        yield f"{m}/score", "score", m, []
        yield f"{m}/generate", "generate", m, "--num_generations 3 --max_completion_length 6 --temperature 1 --seed 5".split()
        yield f"{m}/train", "train", m, STEP + whole
        yield f"{m}/recompute", "train", m, STEP + whole + ["--gradient_checkpointing", "true"]
        yield f"{m}/split", "train", m, STEP + whole + ["--max_stream_tokens", "48", "--num_iterations", "2"]
        yield f"{m}/recalled", "train", m, ONE + whole + ["--torch_dtype", "bfloat16"]
        yield f"{m}/lora", "train", m, STEP + LORA
        yield f"{m}/lora_all", "train", m, STEP + LORA + ["--lora_target_modules", ".*(vis|aud|attn|mlp|proj).*[a-z0-9]"]
        yield f"{m}/lora_8", "train", m, STEP + LORA + ["--load_in_8bit", "true"]
        yield f"{m}/lora_4", "train", m, STEP + LORA + ["--load_in_4bit", "true", "--gradient_checkpointing", "true"]
        yield f"{m}/f32", "train", m, STEP + whole + ["--torch_dtype", "float32"]
        yield f"{m}/bf16", "train", m, STEP + whole + ["--torch_dtype", "bfloat16"]
        yield f"{m}/sft", "sft", m, STEP[4:10] + "--max_completion_length 5 --threads 2".split() + whole


def digest(path):
    if path.suffix == ".jsonl":
        text = ""
        for line in path.read_text().splitlines():
            row = json.loads(line)
            kept = {k: v for k, v in row.items() if not any(t in k for t in TIMES)} if isinstance(row, dict) else row
            text += json.dumps(kept, sort_keys=True) + "\n"
        # Rollouts name media by their whole path.
        data = text.replace(str(GOLDEN), "golden").encode()
    else:
        data = path.read_bytes()
    return hashlib.sha256(data).hexdigest()[:16]


def run(binary, work, name, verb, model, flags):
    out, place = work / "out", work / "model"
    for folder in (out, place):
        shutil.rmtree(folder, ignore_errors=True)
    out.mkdir()
    shutil.copytree(GOLDEN / "checkpoints" / model, place)
    # The tiny checkpoints are made for 256 positions, which a clip exceeds.
    config = place / "config.json"
    config.write_text(re.sub(r'("max_position_embeddings": )256', r"\g<1>4096", config.read_text()))
    rows = ROWS + (HEARD if model.startswith(HEARING) else [])
    rows = [dict(row) for row in rows]
    if reads_text_only(model):
        rows = [row for row in rows if not {"image", "video"} & set(row)]
    elif model == "smolvlm_v1":
        # The processor reads pictures only.
        rows = [row for row in rows if "video" not in row]
    elif model.startswith("qwen"):
        rows[2] |= {"fps": 2.0, "min_pixels": 3136, "max_pixels": 12544}
    if verb == "score":
        for row in rows:
            row["completions"] = ["red", "the left one", "3"]
    if verb == "sft":
        for row in rows:
            row["conversations"] = [{"from": "human", "value": row.pop("problem")}, {"from": "gpt", "value": row["solution"]}]
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = [str(binary), verb, "--model_name_or_path", str(place)]
    if not reads_text_only(model):
        line += ["--image_folders", str(GOLDEN / "media"), "--video_folders", str(GOLDEN / "media")]
    if model.startswith(HEARING):
        line += ["--audio_folders", str(GOLDEN / "media")]
    if verb in ("train", "sft"):
        line += ["--train_file", str(work / "rows.jsonl"), "--output_dir", str(out / "run"), "--max_prompt_length", "400"]
    else:
        line += ["--input", str(work / "rows.jsonl"), "--output", str(out / "out.jsonl")]
    done = subprocess.run(line + flags, cwd=work, capture_output=True, text=True)
    if done.returncode != 0:
        return {"failed": [line for line in done.stderr.splitlines() if line.startswith("error")][:1]}
    made = {}
    for kind, suffix in (("weights", ".safetensors"), ("texts", ".jsonl")):
        files = [p for p in sorted(out.rglob("*" + suffix)) if not {".cache", "skipped.jsonl", "events.jsonl"} & set(p.parts)]
        if files:
            names = "".join(f"{p.relative_to(out)} {digest(p)}\n" for p in files)
            made[kind] = hashlib.sha256(names.encode()).hexdigest()[:16]
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", type=pathlib.Path, required=True)
    parser.add_argument("--record", type=pathlib.Path, help="write the digests to this file")
    parser.add_argument("--check", type=pathlib.Path, help="compare with the digests of this file")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    names = sorted(p.name for p in (GOLDEN / "checkpoints").iterdir() if p.is_dir())
    expected = json.loads(args.check.read_text()) if args.check else {}
    found, wrong = {}, 0
    with tempfile.TemporaryDirectory() as work:
        for case in cases(names):
            if args.only not in case[0]:
                continue
            found[case[0]] = made = run(args.binary.resolve(), pathlib.Path(work), *case)
            # Two failures are not the same result.
            failed = "failed" in made
            if args.check:
                differs = sorted(k for k in {*made, *expected.get(case[0], {})} if made.get(k) != expected.get(case[0], {}).get(k))
                wrong += bool(differs) or failed
                print(f"{case[0]:45} {'same' if not differs else 'DIFFERS in ' + ', '.join(differs)}"
                      + (f": {made['failed']}" if "failed" in made else ""), flush=True)
            else:
                wrong += failed
                print(f"{case[0]:45} {made.get('failed', 'recorded')}", flush=True)
    if args.record and not wrong:
        args.record.write_text(json.dumps(found, sort_keys=True).replace("}, ", "},\n ") + "\n")
    elif args.record:
        print(f"{args.record} is not written: {wrong} of {len(found)} cases failed; clips need ffmpeg")
    if args.check:
        print(f"{len(found) - wrong} of {len(found)} cases are the same to the bit")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
