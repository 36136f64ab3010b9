"""The same rows and settings with TRL, for `seeds.py`.

usage: trl_peer.py FOLDER DTYPE OUT.json SEED STEPS SECONDS
"""

import json
import resource
import statistics
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from reward import exact
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

torch.set_num_threads(2)
folder, dtype, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
seed, steps, seconds = map(int, sys.argv[4:7])
rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
data = Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}], "solution": row["solution"]} for row in rows])


class Limit(TrainerCallback):
    """Ends the run after the given time."""

    def __init__(self):
        self.start = time.time()

    def on_step_end(self, args, state, control, **kwargs):
        if time.time() - self.start > seconds:
            control.should_training_stop = True


trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=getattr(torch, dtype)),
    processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    reward_funcs=exact,
    train_dataset=data,
    args=GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=64, gradient_accumulation_steps=1, num_generations=8, max_completion_length=16,
        learning_rate=3e-4, beta=0.0, max_steps=steps, logging_steps=1, save_strategy="no", report_to="none", bf16=dtype == "bfloat16",
        use_cpu=True, gradient_checkpointing=False, loss_type="grpo", seed=seed,
    ),
    peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"),
    callbacks=[Limit()],
)
start = time.time()
trainer.train()
log = [row for row in trainer.state.log_history if "reward" in row]
out.write_text(json.dumps(dict(
    steps=len(log), secs=time.time() - start, median_step_secs=statistics.median(row["step_time"] for row in log),
    gigabytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, rewards=[row["reward"] for row in log],
)))
