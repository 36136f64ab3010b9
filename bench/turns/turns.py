"""Measures completions of two turns: python bench/turns/turns.py --trl_python VENV/bin/python [--page]

A Qwen3-VL checkpoint learns to call a tool that shows a picture of 196 tokens and then to write, or to write at once. Then GRPO steps of
one prompt and eight completions are timed: two turns, one turn of as many tokens, and two turns in TRL with the same model and tool. The
environment is that of bench/peer (README.md there). Runs alternate, each in a fresh process; the first step of each does not count. With
`--page`, the table in docs/turns.md is replaced. Nothing else should run on the machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs/turns.md"
COMPLETIONS, LONGEST, STEPS, SIDE_PX = 8, 320, 5, 448
QUESTIONS = {"two": "Look into box 3, then write.", "one": "Write."}
CALL = '<tool_call>\n{"name": "look", "arguments": {"box": 3}}\n</tool_call>'
# Longer than a completion may be.
WRITTEN = "one two three four five six seven eight " * 42


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def picture(place, name):
    return {"type": "image", "image": str(place / f"{name}.png")}


def write_model(place):
    """Writes a random checkpoint in the published layout, lessons and questions. Needs the packages of bench/peer."""
    sys.path.insert(0, str(HERE.parent / "peer"))
    import make_workload as peer
    import numpy
    import torch
    import trl
    from transformers import AutoProcessor, Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.utils import get_json_schema

    from look import look

    model = place / "model"
    model.mkdir()
    ids, pixels = peer.ID, dict(patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    ends = dict(bos_token_id=ids["<|endoftext|>"], eos_token_id=ids["<|im_end|>"])
    config = dict(
        architectures=["Qwen3VLForConditionalGeneration"], model_type="qwen3_vl", tie_word_embeddings=True, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        text_config=dict(
            model_type="qwen3_vl_text", hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2,
            head_dim=64, vocab_size=peer.VOCAB, max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=5000000, hidden_act="silu",
            attention_bias=False, initializer_range=0.02, tie_word_embeddings=True, dtype="float32", **ends,
            rope_scaling=dict(mrope_interleaved=True, mrope_section=[12, 10, 10], rope_type="default"),
        ),
        vision_config=dict(
            model_type="qwen3_vl", depth=4, hidden_size=256, intermediate_size=512, num_heads=4, in_channels=3, out_hidden_size=512, patch_size=16,
            spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=784, deepstack_visual_indexes=[1, 2], hidden_act="gelu_pytorch_tanh",
            initializer_range=0.02,
        ),
    )  # fmt: skip
    torch.manual_seed(peer.SEED)
    Qwen3VLForConditionalGeneration._from_config(Qwen3VLConfig(**config), dtype=torch.float32).save_pretrained(model)
    peer.build_tokenizer(peer.pseudo_words(peer.random.Random(peer.SEED))).save(str(model / "tokenizer.json"), pretty=False)
    added = {str(i): dict(content=t, lstrip=False, normalized=False, rstrip=False, single_word=False, special=True) for t, i in ids.items()}
    files = {
        "config": config, "generation_config": {**ends, "pad_token_id": ends["bos_token_id"]},
        "tokenizer_config": dict(
            added_tokens_decoder=added, additional_special_tokens=peer.CONTROL[1:], bos_token=None, clean_up_tokenization_spaces=False,
            eos_token="<|im_end|>", pad_token="<|endoftext|>", tokenizer_class="Qwen2Tokenizer", unk_token=None, model_max_length=32768,
        ),
        "preprocessor_config": dict(
            size=dict(shortest_edge=65536, longest_edge=16777216), **pixels, image_processor_type="Qwen2VLImageProcessorFast", processor_class="Qwen3VLProcessor"
        ),
        "video_preprocessor_config": dict(
            size=dict(shortest_edge=4096, longest_edge=25165824), **pixels, video_processor_type="Qwen3VLVideoProcessor", processor_class="Qwen3VLProcessor"
        ),
    }  # fmt: skip
    for name, content in files.items():
        (model / f"{name}.json").write_text(json.dumps(content, indent=1))
    template = (Path(trl.__file__).parent / "chat_templates/qwen3_vl.jinja").read_text()
    (model / "chat_template.jinja").write_text(template)
    AutoProcessor.from_pretrained(model)

    rng = numpy.random.default_rng(peer.SEED)
    for name in range(8):
        peer.image(rng).save(place / f"{name}.png")
    tools, lessons = [get_json_schema(look)], []
    for name in range(8):
        for kind, question in QUESTIONS.items():
            turns = [{"role": "user", "content": [picture(place, name), {"type": "text", "text": question}]}]
            if kind == "two":
                turns += [{"role": "assistant", "content": CALL}, {"role": "tool", "content": [picture(place, 7 - name), {"type": "text", "text": "the box"}]}]
            lessons.append({"messages": [*turns, {"role": "assistant", "content": WRITTEN}], "tools": tools})
    write_rows(place / "lessons.jsonl", lessons)


def question(place, kind, name):
    return [{"role": "user", "content": [picture(place, name), {"type": "text", "text": QUESTIONS[kind]}]}]


def run_trl(place, threads):
    """Prints the seconds of the steps and the last metrics of TRL."""
    import datasets
    import torch
    import trl
    from PIL import Image
    from transformers import AutoProcessor, TrainerCallback

    from look import look

    torch.set_num_threads(threads)
    ends = []

    class Watch(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            ends.append(time.perf_counter())

        def on_step_end(self, *args, **kwargs):
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as scratch:
        config = trl.GRPOConfig(
            output_dir=scratch, max_steps=STEPS, use_cpu=True, bf16=False, model_init_kwargs={"dtype": "float32"}, gradient_checkpointing=False,
            per_device_train_batch_size=COMPLETIONS, gradient_accumulation_steps=1, num_generations=COMPLETIONS, max_completion_length=LONGEST,
            max_tool_calling_iterations=1, temperature=0.5, beta=0.0, learning_rate=1e-6, logging_steps=1, report_to="none", save_strategy="no",
            disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        rows = [{"prompt": [{"role": "user", "content": QUESTIONS["two"]}], "image": Image.open(place / f"{name}.png")} for name in range(8)]
        trainer = trl.GRPOTrainer(
            str(place / "taught"), lambda completions, **_: [float(i) for i in range(len(completions))], config, datasets.Dataset.from_list(rows),
            processing_class=AutoProcessor.from_pretrained(place / "taught"), tools=[look], callbacks=[Watch()],
        )  # fmt: skip
        trainer.train()
    log = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry][-1]
    print(json.dumps({"steps": [b - a for a, b in zip(ends, ends[1:])], "length": log["completions/mean_length"], "calls": log["tools/call_frequency"]}))


def finished(words, **environment):
    """Runs a program. Returns what it printed and the most memory it used, in MB."""
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen([str(word) for word in words], stdout=said, stderr=subprocess.STDOUT, env={**os.environ, **environment})
        _, status, usage = os.wait4(child.pid, 0)
        said.seek(0)
        text = said.read()
    if status:
        sys.exit(f"{words[:3]}: status {status}\n{text[-3000:]}")
    return text, usage.ru_maxrss * 1024 / 1e6


def own(args, place, kind, repeat):
    out = place / f"{kind}-{repeat}"
    rows = write_rows(place / f"{kind}.jsonl", [{"id": str(name), "prompt": question(place, kind, name)} for name in range(8)])
    _, memory = finished([
        args.program, "train", "--model_name_or_path", place / "taught", "--train_file", rows, "--output_dir", out, "--reward_funcs", "random",
        "--environment", f"{HERE / 'look.py'}:look", "--reward_python", args.trl_python, "--max_turns", 1, "--max_completion_length", LONGEST,
        "--num_generations", COMPLETIONS, "--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 1, "--max_steps", STEPS,
        "--temperature", 0.5, "--beta", 0, "--learning_rate", 1e-6, "--torch_dtype", "float32", "--tune_mm_vision", "true", "--save_strategy", "no",
        "--threads", args.threads, "--device", "cpu",
    ])  # fmt: skip
    steps = list(map(json.loads, (out / "metrics.jsonl").read_text().splitlines()))
    last = steps[-1]
    return {"steps": [step["step_time"] for step in steps], "length": last["completions/mean_length"], "calls": last["tools/call_frequency"], "memory": memory}


def beside(args, place):
    text, memory = finished([args.trl_python, Path(__file__).resolve(), "--side", "trl", "--place", place, "--threads", args.threads],
                            OMP_NUM_THREADS=str(args.threads), CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")  # fmt: skip
    return {**json.loads(text.splitlines()[-1]), "memory": memory}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=Path, default=ROOT / "target/release/omnigrpo")
    parser.add_argument("--trl_python", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--side", choices=["model", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help="folder for the files; the model of an earlier run is used again")
    args = parser.parse_args()
    if args.side:
        return write_model(args.place) if args.side == "model" else run_trl(args.place, args.threads)
    if args.trl_python is None:
        parser.error("--trl_python is missing: the interpreter of an environment with bench/peer/requirements.txt")
    runs = {"two": [], "one": [], "trl": []}
    with tempfile.TemporaryDirectory() as scratch:
        place = args.place or Path(scratch)
        if not (place / "taught/model.safetensors").exists():
            finished([args.trl_python, Path(__file__).resolve(), "--side", "model", "--place", place])
            finished([
                args.program, "sft", "--model_name_or_path", place / "model", "--train_file", place / "lessons.jsonl", "--output_dir", place / "taught",
                "--max_steps", 120, "--learning_rate", 1e-3, "--warmup_steps", 10, "--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 1,
                "--max_completion_length", 1024, "--torch_dtype", "float32", "--save_strategy", "no", "--device", "cpu", "--num_train_epochs", 100,
            ])  # fmt: skip
        for repeat in range(args.repeats):
            for kind in ("two", "one"):
                runs[kind].append(own(args, place, kind, repeat))
            runs["trl"].append(beside(args, place))
    names = {"two": "two turns", "one": "one turn of as many tokens", "trl": "two turns, TRL"}
    lines = ["| a step | seconds | two turns take | peak memory | sampled tokens | calls per completion |", "|---|---|---|---|---|---|"]
    secs = {kind: median(step for run in own for step in run["steps"][1:]) for kind, own in runs.items()}
    for kind, each in runs.items():
        length, calls, memory = (sum(run[key] for run in each) / len(each) for key in ("length", "calls", "memory"))
        lines.append(f"| {names[kind]} | {secs[kind]:.2f} | {secs['two'] / secs[kind]:.2f} of it | {memory / 1000:.2f} GB | {length:.0f} | {calls:.2f} |")
    print("\n".join(lines))
    calls = min(run["calls"] for kind in ("two", "trl") for run in runs[kind])
    if calls < 0.95:
        sys.exit(f"{calls:.2f} calls per completion, expected at least 0.95: the model has not learned the call")
    if secs["two"] > 1.15 * secs["one"]:
        sys.exit(f"two turns take {secs['two'] / secs['one']:.2f} of the time of one turn, expected at most 1.15")
    if args.page:
        begin, end = "<!-- turns: bench/turns/turns.py -->\n", "<!-- end of turns -->"
        head, rest = PAGE.read_text().split(begin)
        PAGE.write_text(head + begin + "\n" + "\n".join(lines) + "\n\n" + end + rest.split(end, 1)[1])


if __name__ == "__main__":
    main()
