import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoProcessor, BitsAndBytesConfig, Qwen3VLForConditionalGeneration
from trl import GRPOConfig, GRPOTrainer

rows = load_dataset("lmms-lab/multimodal-open-r1-8k-verified", split="train[:5%]")
base = "Qwen/Qwen3-VL-4B-Instruct"
processor = AutoProcessor.from_pretrained(base, padding_side="left")


def tags(completions, **rest):
    return [1.0 if "<think>" in text else 0.0 for text in completions]


def size(completions, **rest):
    return [-len(text) / 1000 for text in completions]


model = Qwen3VLForConditionalGeneration.from_pretrained(
    base,
    dtype="float32",
    device_map="auto",
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float16
    ),
)
adapters = LoraConfig(target_modules=["q_proj", "v_proj"], r=8, lora_alpha=32, lora_dropout=0.1)
out = "Qwen3-VL-4B-Instruct-trl-grpo"
config = GRPOConfig(
    output_dir=out, push_to_hub=True, report_to="trackio", logging_steps=1, log_completions=True, fp16=True,
    learning_rate=2e-5, max_steps=100, num_generations=2, per_device_train_batch_size=2, max_completion_length=1024,
)
GRPOTrainer(model=model, reward_funcs=[tags, size], args=config, train_dataset=rows, peft_config=adapters).train()
