"""A training script of TRL that takes its settings from the command line."""
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.rewards import accuracy_reward, think_format_reward

script, config, model = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
rows = load_dataset("lmms-lab/multimodal-open-r1-8k-verified", split="train")
trainer = GRPOTrainer(
    model=model.model_name_or_path,
    args=config,
    reward_funcs=[think_format_reward, accuracy_reward],
    train_dataset=rows,
    peft_config=get_peft_config(model),
)
trainer.train()
