from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from unsloth import FastVisionModel

choices = ["unsloth/Pixtral-12B-2409", "unsloth/gemma-3-4b-it"]
model, tokenizer = FastVisionModel.from_pretrained(
    "unsloth/gemma-3-4b-it", load_in_4bit=True, use_gradient_checkpointing="unsloth"
)
model = FastVisionModel.get_peft_model(
    model, r=16, lora_alpha=16, lora_dropout=0, bias="none", random_state=3407, use_rslora=False, loftq_config=None,
    finetune_vision_layers=False, finetune_language_layers=True, use_gradient_checkpointing="unsloth",
)
rows = load_dataset("AI4Math/MathVista", split="testmini")


def shape(completions, **rest):
    return [float("<SOLUTION>" in text) for text in completions]


config = GRPOConfig(
    output_dir="outputs", report_to="none", logging_steps=1, max_steps=60, save_steps=60, max_grad_norm=0.1,
    optim="adamw_8bit", learning_rate=5e-6, lr_scheduler_type="cosine", warmup_ratio=0.1, weight_decay=0.001,
    adam_beta1=0.9, adam_beta2=0.99,
    per_device_train_batch_size=1, gradient_accumulation_steps=2, num_generations=4,
    max_prompt_length=1024, max_completion_length=1024,
    importance_sampling_level="sequence", loss_type='dr_grpo', mask_truncated_completions=False,
)
GRPOTrainer(model=model, args=config, processing_class=tokenizer, reward_funcs=[shape], train_dataset=rows).train()
