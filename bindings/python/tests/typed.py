"""A program that a type checker reads; it is not run."""

import omnigrpo


def brief(completions: list[list[dict[str, str]]], **columns: object) -> list[float]:
    return [-float(len(completion[0]["content"])) for completion in completions]


args = omnigrpo.GRPOConfig("runs/brief", num_generations=8, learning_rate=1e-5, loss_type="dapo", use_peft=True)
trainer = omnigrpo.GRPOTrainer("model", ["accuracy", brief], args, [{"prompt": "?", "solution": "1"}])
omnigrpo.GRPOTrainer("model", None, args, "rows.jsonl", tools=[brief], environment_factory={"one": object})
steps: int = trainer.train().global_step
text: str = trainer.model.generate(["?"], temperature=0.0)[0][0]["text"]
omnigrpo.GRPOConfig(num_generations="many")  # type: ignore[arg-type]
omnigrpo.GRPOConfig(learning_rat=1e-5)  # type: ignore[call-arg]
