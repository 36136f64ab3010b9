#!/usr/bin/env python3
"""Times `transformers` on the sizes of the first measurement of tools/gpu/first-contact: a group of completions of one prompt.

    python3 bench/gpu/transformers_peer.py bench/gpu/3b

Each row has its own copy of the prompt, as in TRL. Needs a card, PyTorch and transformers. Writes one line of JSON.
"""

import json
import sys
import time

import torch
import transformers

PROMPT, GROUP, TOKENS = 1792, 8, 256


def seconds(work):
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def model_of(folder):
    """Returns a random model of a configuration, in bf16 on the card."""
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    return model


def generation(model, prompts):
    """Returns the seconds of sampling all tokens, after a short run."""

    def sample(tokens):
        with torch.no_grad():
            model.generate(
                input_ids=prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=tokens, min_new_tokens=tokens,
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=151643)

    model.eval()
    seconds(lambda: sample(8))
    return seconds(lambda: sample(TOKENS))


def training(model, rows, micro):
    """Returns the seconds of a forward and a backward pass over all rows, `micro` at a time, after a first run."""

    def step():
        for part in rows.split(micro):
            logits = model(input_ids=part, attention_mask=torch.ones_like(part), logits_to_keep=TOKENS + 1).logits[:, :-1].float()
            logprobs = torch.log_softmax(logits, -1).gather(-1, part[:, -TOKENS:, None])
            (-logprobs.mean() * len(part) / GROUP).backward()
        model.zero_grad(set_to_none=True)

    model.train()
    seconds(step)
    return min(seconds(step) for _ in range(2))


def main():
    model = model_of(sys.argv[1])
    prompts = torch.randint(0, 150000, (1, PROMPT), device="cuda").expand(GROUP, PROMPT).contiguous()
    rows = torch.cat([prompts, torch.randint(0, 150000, (GROUP, TOKENS), device="cuda")], 1)
    out = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__,
        "parameters": sum(p.numel() for p in model.parameters()), "attention": model.config._attn_implementation,
        "prompt": PROMPT, "group": GROUP, "tokens": TOKENS, "generate_secs": generation(model, prompts),
        "train_secs_micro2": training(model, rows, 2),
    }
    model.gradient_checkpointing_enable()
    out["train_secs_micro8_checkpointing"] = training(model, rows, 8)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
