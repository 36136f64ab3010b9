"""Runs TRL's GRPOTrainer once on a workload and writes the same JSON as run_omnigrpo.py, with the time of each phase.

    python run_trl.py --workload image1 --steps 3 --output result.json

TRL runs unchanged, with its fused head and optimizer; methods are wrapped only to read the clock. A phase excludes the
phases inside it, so phases and `other` add up to the step. A step lasts from the end of the previous step to its own
end, including the loading of images and logging.
"""

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from functools import wraps

from workloads import (
    BETA, LEARNING_RATE, LORA_RANK, MAX_GRAD_NORM, NUM_GENERATIONS, SEED, TEMPERATURE, WORKLOADS, directory, model_of, peak_mb,
    read_jsonl,
)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--torch_dtype", default="float32")
    parser.add_argument("--num_generations", type=int, default=NUM_GENERATIONS)
    parser.add_argument("--use_peft", action="store_true")
    parser.add_argument("--output", required=True)
    return parser.parse_args()


ARGS = arguments()
# torch and tokenizers read these variables when they load.
os.environ.update(
    OMP_NUM_THREADS=str(ARGS.threads), MKL_NUM_THREADS=str(ARGS.threads), RAYON_NUM_THREADS=str(ARGS.threads),
    CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1",
)

import random  # noqa: E402

import datasets  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from transformers import AutoProcessor, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

torch.set_num_threads(ARGS.threads)


class Clock:
    """Measures the exclusive time of nested phases; a step ends with `next_step`."""

    def __init__(self):
        self.steps = []
        self.restart()

    def restart(self):
        self.started = self.switched = time.perf_counter()
        self.phases, self.stack = defaultdict(float), ["other"]

    def switch(self):
        now = time.perf_counter()
        self.phases[self.stack[-1]] += now - self.switched
        self.switched = now

    @contextmanager
    def phase(self, name):
        self.switch()
        self.stack.append(name)
        try:
            yield
        finally:
            self.switch()
            self.stack.pop()

    def wrap(self, owner, method, name):
        """Wraps a bound method in a phase; `name` may be a function of the arguments."""
        inner = getattr(owner, method)

        @wraps(inner)
        def timed(*args, **kwargs):
            with self.phase(name(*args, **kwargs) if callable(name) else name):
                return inner(*args, **kwargs)

        setattr(owner, method, timed)

    def next_step(self):
        self.switch()
        self.steps.append({"step_time": self.switched - self.started, "phases": dict(self.phases)})
        self.restart()


class Watch(TrainerCallback):
    """Divides the run into steps and checks that everything is trained."""

    def __init__(self, clock, unused):
        self.clock, self.unused = clock, unused

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        self.clock.wrap(optimizer, "step", "optimizer")
        self.clock.restart()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
        cold = [n for n, p in trained if p.grad is None and not n.startswith(self.unused)]
        assert not cold, f"no gradient: {cold}"

    def on_step_end(self, args, state, control, **kwargs):
        self.clock.next_step()


def processor_of(clock):
    """Wraps the processor, so that its calls (image decoding, resizing, patches, tokens) count as `data`."""
    loader = AutoProcessor if WORKLOADS[ARGS.workload].sees else AutoTokenizer
    processor = loader.from_pretrained(model_of(ARGS.workload))
    plain = type(processor)

    class Timed(plain):
        def __call__(self, *args, **kwargs):
            with clock.phase("data"):
                return super().__call__(*args, **kwargs)

    Timed.__name__ = plain.__name__
    processor.__class__ = Timed
    return processor


def rows_of(root, has_images):
    rows = read_jsonl(root / "trl.jsonl")
    for row in rows:
        if has_images:
            row["images"] = [str(root / path) for path in row["images"]]
    rows = datasets.Dataset.from_list(rows)
    # These are paths, which are opened when a step reads the row.
    return rows.cast_column("images", datasets.List(datasets.Image())) if has_images else rows


def main():
    root, workload, clock, rng = directory(ARGS.workload), WORKLOADS[ARGS.workload], Clock(), random.Random(SEED)
    imported_mb = peak_mb()

    def random_reward(completions, **_):
        return [rng.random() for _ in completions]

    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch, seed=SEED, max_steps=ARGS.steps, use_cpu=True,
            bf16=ARGS.torch_dtype == "bfloat16",
            model_init_kwargs={"dtype": ARGS.torch_dtype}, gradient_checkpointing=False,
            per_device_train_batch_size=ARGS.num_generations, gradient_accumulation_steps=1,
            num_generations=ARGS.num_generations, max_completion_length=workload.completion_tokens,
            generation_kwargs={"min_new_tokens": workload.completion_tokens}, temperature=TEMPERATURE,
            loss_type="grpo", beta=BETA, use_bias_correction_kl=False, scale_rewards="group",
            learning_rate=LEARNING_RATE, lr_scheduler_type="linear", weight_decay=0.0, max_grad_norm=MAX_GRAD_NORM,
            logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        )
        adapter = None
        if ARGS.use_peft:
            import peft

            adapter = peft.LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        trainer = GRPOTrainer(
            model=str(model_of(ARGS.workload)), peft_config=adapter, reward_funcs=random_reward, args=config, processing_class=processor_of(clock),
            train_dataset=rows_of(root, workload.num_images > 0),
            # A text row gives the tower no gradient.
            callbacks=[Watch(clock, () if workload.num_images else "model.visual.")],
        )
        if not ARGS.use_peft:
            assert all(p.requires_grad and p.dtype == getattr(torch, ARGS.torch_dtype) for p in trainer.model.parameters())

        def scored_model(model, *args, **kwargs):
            if model is trainer.ref_model:
                return "reference"
            return "forward" if torch.is_grad_enabled() else "old"

        for method, name in (
            ("get_batch_samples", "data"), ("_tokenize_prompts", "data"), ("_generate_single_turn", "generate"),
            ("_calculate_rewards", "reward"), ("_get_per_token_logps_and_entropies", scored_model),
            ("compute_loss", "forward"), ("_clip_grad_norm", "optimizer"),
        ):
            clock.wrap(trainer, method, name)
        clock.wrap(trainer.accelerator, "backward", "backward")
        ready_mb = peak_mb()
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]

    assert len(clock.steps) == len(log) == ARGS.steps, (len(clock.steps), len(log))
    for step, entry in enumerate(log, 1):
        # TRL counts tokens over the run, with a copy of the prompt for every completion.
        tokens = step * ARGS.num_generations * (workload.prompt_tokens + workload.completion_tokens)
        assert entry["num_tokens"] == tokens, f"num_tokens {entry['num_tokens']}, expected {tokens}"
        assert entry["completions/mean_length"] == workload.completion_tokens, entry
        assert entry["frac_reward_zero_std"] == 0, entry
    result = dict(
        system="trl", workload=ARGS.workload, threads=ARGS.threads, steps=clock.steps, peak_mb=peak_mb(),
        imported_mb=imported_mb, ready_mb=ready_mb,
        versions=dict(trl=trl.__version__, transformers=transformers.__version__, torch=torch.__version__),
        attention=trainer.model.config._attn_implementation, optimizer=str(config.optim.value),
        prompt_tokens=workload.prompt_tokens, num_tokens=[entry["num_tokens"] for entry in log],
        grad_norm=[float(entry["grad_norm"]) for entry in log], kl=[entry["kl"] for entry in log],
    )
    with open(ARGS.output, "w") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
