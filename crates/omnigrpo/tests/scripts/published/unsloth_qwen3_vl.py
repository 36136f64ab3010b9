from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from unsloth import FastVisionModel

longest = 16384
model, tokenizer = FastVisionModel.from_pretrained(
    model_name="unsloth/Qwen3-VL-8B-Instruct-unsloth-bnb-4bit",
    load_in_4bit=True, fast_inference=False, max_seq_length=longest, gpu_memory_utilization=0.8,
)
model = FastVisionModel.get_peft_model(
    model,
    r=16, lora_alpha=16, lora_dropout=0, bias="none", use_rslora=False, loftq_config=None, random_state=3407,
    finetune_vision_layers=False, finetune_language_layers=True,
    finetune_attention_modules=True, finetune_mlp_modules=True,
    use_gradient_checkpointing="unsloth",
)
rows = load_dataset("AI4Math/MathVista", split="testmini")


def shape(completions, **rest):
    return [float("<SOLUTION>" in text) for text in completions]


def right(completions, answer, **rest):
    return [2.0 * (gold in text) for text, gold in zip(completions, answer)]


config = GRPOConfig(
    output_dir="outputs", report_to="none", log_completions=False, logging_steps=1, save_steps=60,
    optim="adamw_8bit", learning_rate=5e-6, lr_scheduler_type="cosine", warmup_ratio=0.1, weight_decay=0.1,
    adam_beta1=0.9, adam_beta2=0.99, max_grad_norm=0.1,
    per_device_train_batch_size=2, gradient_accumulation_steps=1, num_generations=2,
    max_prompt_length=1024, max_completion_length=1024, num_train_epochs=0.5,
    importance_sampling_level="sequence", loss_type="dr_grpo", mask_truncated_completions=False,
)
GRPOTrainer(model=model, args=config, processing_class=tokenizer, reward_funcs=[shape, right], train_dataset=rows).train()
