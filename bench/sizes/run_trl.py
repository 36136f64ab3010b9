"""Runs the step of run.py in TRL: LoRA on a model of Qwen2.5-VL's sizes with random weights; measures each step and peak memory.

    python3 bench/sizes/run.py --tokenizer DIR --only "3B, bf16, kept, no" --keep SIZES
    python bench/sizes/run_trl.py SIZES/3B SIZES/rows.jsonl --output FILE --gradient_checkpointing

Needs an environment with bench/peer/requirements.txt and peft 0.21.2. A step is one generation and one update.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("model", type=Path)
parser.add_argument("rows", type=Path)
parser.add_argument("--output", type=Path, required=True)
parser.add_argument("--torch_dtype", default="bfloat16")
parser.add_argument("--gradient_checkpointing", action="store_true")
parser.add_argument("--steps", type=int, default=1)
parser.add_argument("--threads", type=int, default=2)
ARGS = parser.parse_args()
# torch and tokenizers read these variables when they load.
os.environ.update(
    OMP_NUM_THREADS=str(ARGS.threads), MKL_NUM_THREADS=str(ARGS.threads), CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1",
)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peer"))

import datasets  # noqa: E402
import torch  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from workloads import peak_mb  # noqa: E402

torch.set_num_threads(ARGS.threads)
GROUP, NEW_TOKENS = 8, 64


class Watch(TrainerCallback):
    """Measures seconds of each step, with the loading of its rows."""

    def __init__(self):
        self.steps = []

    def on_train_begin(self, *args, **kwargs):
        self.since = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        now = time.perf_counter()
        self.steps.append(now - self.since)
        self.since = now
        print(f"step {len(self.steps)}: {self.steps[-1]:.1f} s, peak {peak_mb() / 1000:.1f} GB", file=sys.stderr, flush=True)


def main():
    rows = [json.loads(line) for line in ARGS.rows.read_text().splitlines()]
    rows = [{"prompt": [{"role": "user", "content": row["problem"]}], "images": [row["image"]]} for row in rows]
    rows = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    dtype = getattr(torch, ARGS.torch_dtype)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(ARGS.model), dtype=dtype)
    model.config._name_or_path = str(ARGS.model)
    lora = LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.0, task_type="CAUSAL_LM",
        target_modules=r".*language_model.*\.(q|k|v|o|gate|up|down)_proj",
    )
    watch, rng = Watch(), random.Random(1)
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch, seed=1, max_steps=ARGS.steps, use_cpu=True, bf16=dtype == torch.bfloat16,
            gradient_checkpointing=ARGS.gradient_checkpointing, per_device_train_batch_size=GROUP,
            gradient_accumulation_steps=1, num_generations=GROUP, max_completion_length=NEW_TOKENS,
            generation_kwargs={"min_new_tokens": NEW_TOKENS}, temperature=1.0, loss_type="grpo", beta=0.04,
            use_bias_correction_kl=False, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = GRPOTrainer(
            model=model, reward_funcs=lambda completions, **_: [rng.random() for _ in completions], args=config,
            processing_class=AutoProcessor.from_pretrained(ARGS.model), train_dataset=rows, peft_config=lora,
            callbacks=[watch],
        )
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    assert len(log) == ARGS.steps and all(entry["completions/mean_length"] == NEW_TOKENS for entry in log), log
    ARGS.output.write_text(json.dumps(dict(steps=watch.steps, peak_mb=peak_mb(), num_tokens=log[-1]["num_tokens"])))


if __name__ == "__main__":
    main()
