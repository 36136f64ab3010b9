"""Measures the memory of each rank of a run: python3 bench/ranks/memory.py [--program P] [--only NAME] [--page]

Needs `mpirun`, the program and Python without packages. Models have random weights, and rows are short texts, so that weights, gradients
and the state of the optimizer are most of the memory. *Own* is the memory that no other process uses, and *shared* that which several
ranks use together, such as weights in a mapped file: the largest values of all ranks, without those of a run that trains almost nothing.
With `--page`, the tables in docs/scale.md are replaced.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/memory"))
from compare import checkpoint, rows  # noqa: E402

PAGE = ROOT / "docs/scale.md"
# Width, feed-forward, layers, heads, key-value heads, vocabulary. The second has the sizes of Qwen2.5 0.5B.
TRAINED = (768, 2048, 8, 12, 4, 24_000)
BASE = (896, 4864, 24, 14, 2, 151_936)
SHARDS = ["none", "optimizer", "gradients", "weights"]
RANKS = [1, 2, 4]
MB = 1e6
ENVIRONMENT = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
STEPS = 2


def command(program, file, out, ranks, words):
    launcher = ["mpirun", "--bind-to", "none", "--oversubscribe", "-n", ranks] if ranks > 1 else []
    train = [
        program, "train", "--train_file", file, "--output_dir", out, "--reward_funcs", "random",
        "--num_generations", 2, "--max_completion_length", 8, "--gradient_accumulation_steps", 1, "--max_steps", STEPS,
        "--save_strategy", "no", "--device", "cpu", "--threads", 1, "--torch_dtype", "bfloat16", "--skip_data_check",
        "--gradient_checkpointing", *words,
    ]  # fmt: skip
    return [str(word) for word in [*launcher, *train]]


def memory(pid):
    """Returns the own and the shared memory of a process, in bytes."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    of = lambda name: int(text.split(f"{name}:")[1].split()[0]) * 1024
    return of("Private_Dirty") + of("Private_Clean"), of("Shared_Clean") + of("Shared_Dirty")


def children(out):
    """Returns the ranks of the run that writes to `out`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if len(words) > 1 and words[1] == b"train" and str(out).encode() in words:
            found.append(int(path.parent.name))
    return found


def measure(program, place, name, ranks, words):
    """Returns the largest own and shared memory of a rank, and the sum over the ranks at the moment of its largest value."""
    out = place / name
    with open(place / f"{name}.log", "w") as log:
        run = subprocess.Popen(command(program, place / "rows.jsonl", out, ranks, words), env=ENVIRONMENT, stdout=log, stderr=log)
        own, shared, everything = 0, 0, 0
        while run.poll() is None:
            each = []
            for pid in children(out):
                try:
                    each.append(memory(pid))
                except (OSError, IndexError):
                    pass  # The process has just ended.
            if each:
                own, shared = max(own, *(a for a, _ in each)), max(shared, *(b for _, b in each))
                everything = max(everything, sum(a for a, _ in each) + max(b for _, b in each))
            time.sleep(0.02)
    if run.returncode:
        sys.exit(f"{name}: status {run.returncode}\n{(place / f'{name}.log').read_text()[-2000:]}")
    return own, shared, everything


def saved(program, place, sizes):
    """Writes a model with random weights in bf16, and returns its directory."""
    (place / "pictures").mkdir()
    checkpoint(place / "sizes", sizes)
    rows(place / "pictures", 1, 16, ("image", 56))
    # Only the projector is trained, so this takes little more memory than the weights.
    words = ["--model_name_or_path", place / "sizes", "--init_weights", 1, "--tune_mm_llm", "false", "--beta", 0]
    words += ["--image_folders", place / "pictures"]
    run = command(program, place / "pictures/rows.jsonl", place / "start", 1, words)
    with open(place / "start.log", "w") as log:
        done = subprocess.run(run, stdout=log, stderr=log)
    if done.returncode:
        sys.exit((place / "start.log").read_text()[-2000:])
    return place / "start"


def count(model):
    """Returns the numbers of weights of a saved model: of the language model, and of the other parts."""
    own, others = 0, 0
    for path in model.glob("*.safetensors"):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                size = math.prod(tensor["shape"])
                own, others = (own, others + size) if name.startswith("visual") else (own + size, others)
    return own, others


def trained_bytes(weights, shard, ranks):
    """Returns the bytes of a rank for weights in bf16, gradients, moments and masters."""
    part = {"none": 0, "optimizer": 12, "gradients": 16, "weights": 18}[shard]
    cut = (18 - part) * weights + part * weights / ranks
    # The rollout has complete weights, and no gradients.
    return max(cut, 2 * weights + 12 * weights / ranks) if shard == "weights" else cut


def trained_table(program, place):
    """All weights of the language model are trained."""
    model = saved(program, place, TRAINED)
    rows(place, 16, 24)
    weights, others = count(model)
    start = ["--model_name_or_path", model]
    yield f"{weights / MB:.0f} million weights, bf16 with masters. MB of a rank:\n"
    yield "| `--shard` | ranks | formula | measured |"
    yield "|---|---|---|---|"
    rest = None
    for shard in SHARDS:
        for ranks in RANKS if shard == "none" else RANKS[1:]:
            words = [*start, "--beta", 0, "--learning_rate", "1e-6", "--shard", shard, "--reduce_bucket_size", 1 << 20]
            own, *_ = measure(program, place, f"trained-{shard}-{ranks}", ranks, words)
            formula = trained_bytes(weights, shard, ranks)
            # The program, the tower and the work of a step take the same memory in all runs.
            rest = own - formula if rest is None else rest
            yield f"| {shard} | {ranks} | {formula / MB:.0f} | {(own - rest) / MB:.0f} |"


def base_table(program, place):
    """Adapters are trained, and the frozen base is in a file."""
    model = saved(program, place, BASE)
    rows(place, 16, 24)
    weights, others = count(model)
    yield f"{(weights + others) / MB:.0f} million frozen weights in bf16, LoRA of rank 16 with KL to the base. MB:\n"
    yield "| `--shard` | ranks | own memory of a rank | shared memory | all ranks together |"
    yield "|---|---|---|---|---|"
    for shard in ["none", "weights"]:
        for ranks in RANKS if shard == "none" else RANKS[1:]:
            words = ["--model_name_or_path", model, "--use_peft", "--lora_r", 16, "--beta", 0.04, "--shard", shard]
            own, shared, everything = measure(program, place, f"base-{shard}-{ranks}", ranks, words)
            yield f"| {shard} | {ranks} | {own / MB:.0f} | {shared / MB:.0f} | {everything / MB:.0f} |"


TABLES = {"trained": trained_table, "base": base_table}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=Path, default=ROOT / "target/release/omnigrpo")
    parser.add_argument("--only", choices=TABLES)
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    for name, table in TABLES.items():
        if args.only and name != args.only:
            continue
        with tempfile.TemporaryDirectory() as place:
            lines = []
            for line in table(args.program.resolve(), Path(place)):
                print(line, flush=True)
                lines.append(line)
        if args.page:
            begin, end = f"<!-- {name}: bench/ranks/memory.py -->\n", f"<!-- end of {name} -->"
            head, rest = PAGE.read_text().split(begin)
            PAGE.write_text(head + begin + "\n" + "\n".join(lines) + "\n\n" + end + rest.split(end, 1)[1])


if __name__ == "__main__":
    main()
