"""Loads an adapter that omnigrpo saved with peft, and compares it with what omnigrpo merged and with what it scored.

    omnigrpo export --model_name_or_path BASE --adapter_name_or_path ADAPTER --merge --output_dir MERGED
    omnigrpo score --model_name_or_path BASE --adapter_name_or_path ADAPTER --input ROWS --output SCORES
    python tools/goldens/check_adapter.py BASE ADAPTER MERGED [ROWS SCORES]

ROWS are rows of text only, {"id", "problem", "completions"}. Exit status 0 when peft finds every tensor of the adapter
and has none left over, the logits of both models agree to 1e-4, and so do the log-probs of the completions.
"""

import json
import sys
import warnings

import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoTokenizer

TOLERANCE = 1e-4


def load(directory: str):
    return AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


def adapted(base: str, adapter: str):
    model = load(base)
    # A tensor that the adapter lacks is only a warning of peft.
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        wrapped = PeftModel.from_pretrained(model, adapter).eval()
    config = wrapped.peft_config["default"]
    fresh = [n for n, p in wrapped.named_parameters() if "lora_B" in n and not p.any()]
    if fresh:
        sys.exit(f"{len(fresh)} layers got no values: {fresh[:5]}")
    print(f"peft: {sum('lora_A' in n for n, _ in wrapped.named_parameters())} layers, r {config.r}")
    return wrapped


@torch.no_grad()
def text_logits(model, ids):
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def main(base, adapter, merged, rows=None, scores=None):
    wrapped, whole = adapted(base, adapter), load(merged)
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for length in (7, 40):
        ids = torch.randint(0, 250, (length,), generator=generator).tolist()
        worst = max(worst, float((text_logits(wrapped, ids) - text_logits(whole, ids)).abs().max()))
    print(f"logits of the adapter and of the merged checkpoint: {worst:.1e}")
    if worst > TOLERANCE:
        sys.exit("the merged checkpoint is another model")
    if rows is None:
        return
    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    read = lambda path: [json.loads(line) for line in open(path) if line.strip()]
    worst = 0.0
    for row, scored in zip(read(rows), read(scores), strict=True):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": [{"type": "text", "text": row["problem"]}]}], tokenize=False,
            add_generation_prompt=True,
        )
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(prompt) == scored["prompt_tokens"], row["id"]
        for completion in scored["completions"]:
            ids = completion["completion_ids"]
            logp = text_logits(wrapped, prompt + ids)[len(prompt) - 1 : -1].log_softmax(-1)
            got = logp.gather(1, torch.tensor(ids)[:, None])[:, 0]
            worst = max(worst, float((got - torch.tensor(completion["logprobs"])).abs().max()))
    print(f"log-probs of peft and of omnigrpo: {worst:.1e}")
    if worst > TOLERANCE:
        sys.exit("peft computes something else")


if __name__ == "__main__":
    if len(sys.argv) not in (4, 6):
        sys.exit(__doc__)
    main(*sys.argv[1:])
