# %% [markdown]
# # Teach a small model to say what it sees
#
# The cells below train the model of `omnigrpo demo` with a reward written in Python, in 75 seconds of processor time. Editors that
# know `# %%` (VS Code, PyCharm, Spyder, Jupytext) run them as a notebook; `python examples/notebook.py` runs them as a script.

# %%
from omnigrpo import GRPOConfig, GRPOTrainer, evaluate, write_demo

write_demo("demo", train=2000, eval=300)


# %% The reward: 1 if the answer between the tags ends with the right word. `answer` is a column of the rows.
def right(completions, answer, **kwargs):
    said = [completion[0]["content"] for completion in completions]
    return [float(text.endswith(f"{word}</answer>")) for text, word in zip(said, answer)]


# %% Groups of 8 completions per question, 16 questions per step.
args = GRPOConfig("runs/notebook", num_generations=8, per_device_train_batch_size=16, gradient_accumulation_steps=1, max_completion_length=12,
                  max_steps=250, learning_rate=3e-4, beta=0.01, tune_mm_vision=True, use_cpu=True)
trainer = GRPOTrainer("demo/model", right, args, "demo/data/train.jsonl")
before = evaluate("demo/model", "demo/data/eval.jsonl", right, max_completion_length=12)
trainer.train()

# %% The trained model on questions that it has not seen. `trainer.model` is in memory and answers at once.
after = evaluate("runs/notebook", "demo/data/eval.jsonl", right, max_completion_length=12)
for name, found in {"before": before, "after": after}.items():
    print(name, found["metrics"]["eval_rewards/right/mean"])
print(trainer.model.generate(["Say a number."], max_completion_length=12)[0][0]["text"])
