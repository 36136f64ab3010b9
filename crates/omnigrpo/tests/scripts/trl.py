import re
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

model_id = "Qwen/Qwen2.5-VL-3B-Instruct"
dataset = load_dataset("me/counting", split="train[:5%]")


def format_reward(completions, **kwargs):
    return [float(bool(re.match("<think>.*</answer>", text))) for text in completions]


def accuracy_reward(completions, solution, **kwargs):
    return [float(text == gold) for text, gold in zip(completions, solution)]


training_args = GRPOConfig(
    output_dir=f"{model_id}-counting",
    learning_rate=1e-5,
    num_train_epochs=1,
    bf16=True,
    per_device_train_batch_size=2,
    num_generations=2,
    max_completion_length=1_024,
    max_prompt_length=2048,
    remove_unused_columns=False,
    report_to=["tensorboard"],
    reward_weights=[0.5, 1.0],
    beta=0.04,
)
peft_config = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
trainer = GRPOTrainer(
    model=model_id,
    reward_funcs=[format_reward, accuracy_reward],
    args=training_args,
    train_dataset=dataset,
    peft_config=peft_config,
)
trainer.train()
