"""Runs TRL's GRPOTrainer once: `python run_trl.py ROWS OUT SEED THREADS`. Writes checkpoints and log.json to OUT."""

import json
import os
import sys
from pathlib import Path

ROWS, OUT, SEED, THREADS = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
# torch and tokenizers read these variables when they load.
os.environ.update(
    OMP_NUM_THREADS=str(THREADS), MKL_NUM_THREADS=str(THREADS), RAYON_NUM_THREADS=str(THREADS), CUDA_VISIBLE_DEVICES="",
    HF_HUB_OFFLINE="1",
)

import datasets  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from transformers import AutoProcessor  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from reward import right  # noqa: E402
from settings import MODEL, PROMPTS, SHARED  # noqa: E402

torch.set_num_threads(THREADS)


def main():
    rows = []
    for line in ROWS.read_text().splitlines():
        row = json.loads(line)
        question = row["conversations"][0]["value"].removeprefix("<image>")
        rows.append(dict(prompt=[dict(role="user", content=question)], images=[row["image"]], solution=row["solution"]))
    # These are paths, which are opened when a step reads the row.
    rows = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    config = GRPOConfig(
        output_dir=str(OUT), seed=SEED, **SHARED, use_cpu=True, bf16=False, model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False, scale_rewards="group", use_bias_correction_kl=False,
        # One prompt per batch: with this family, the trainer fails on a batch of prompts of unequal length.
        per_device_train_batch_size=SHARED["num_generations"], steps_per_generation=1, gradient_accumulation_steps=PROMPTS,
        report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model=str(MODEL), reward_funcs=right, args=config, processing_class=AutoProcessor.from_pretrained(MODEL), train_dataset=rows,
    )
    assert all(p.requires_grad and p.dtype == torch.float32 for p in trainer.model.parameters())
    trainer.train()
    log = [dict(reward=e["reward"], kl=e["kl"], length=e["completions/mean_length"], tokens=e["num_tokens"])
           for e in trainer.state.log_history if "reward" in e]
    versions = dict(trl=trl.__version__, transformers=transformers.__version__, torch=torch.__version__)
    (OUT / "log.json").write_text(json.dumps(dict(steps=log, versions=versions)))


if __name__ == "__main__":
    main()
