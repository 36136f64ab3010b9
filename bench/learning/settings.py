"""Settings of both trainers."""

from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[1] / "crates/demo/assets/model"

STEPS = 100
PROMPTS = 8
GENERATIONS = 8
# Steps between saved models, whose held-out accuracy is measured.
EVERY = 20
# Settings with the same name in both programs.
SHARED = dict(
    num_generations=GENERATIONS, max_completion_length=12, temperature=1.0, top_p=1.0, top_k=0, loss_type="grpo", beta=0.01, epsilon=0.2,
    num_iterations=1, learning_rate=3e-4, lr_scheduler_type="constant_with_warmup", warmup_steps=10, weight_decay=0.0, adam_beta1=0.9,
    adam_beta2=0.999, adam_epsilon=1e-8, max_grad_norm=1.0, max_steps=STEPS, save_strategy="steps", save_steps=EVERY,
    save_only_model=True, logging_steps=1,
)
