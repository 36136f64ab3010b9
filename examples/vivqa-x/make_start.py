"""What a run on the small dataset starts from: a model directory in InternVL's published layout, and rows that teach the form.

    python examples/vivqa-x/make_start.py runs/vivqa-data runs/vivqa-model

Needs the package tokenizers and the converted rows, no network. The directory has a configuration and a tokenizer made
from the data; its weights come from `--init_weights`. `sft.jsonl`, beside the data, has the first training rows with a
`<think>` part in front of their answers.
"""

import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Ids as in InternVL's tokenizers: ordinary added tokens behind the control tokens.
MEDIA = ["<img>", "</img>", "<IMG_CONTEXT>"]
# Qwen2's rule for splitting text before merging.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SIDE, PATCH = 56, 7
SFT_ROWS = 150


def corpus(data):
    """What the model will read and write."""
    yield "system\nuser\nassistant\n"
    yield "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"
    for path in sorted(data.glob("ViVQA-X_*_grpo.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            yield from (turn["value"] for turn in row["conversations"])
            yield from row["explanations"]
            yield "<think>"
            yield "</think>"


def first_rows(data):
    """Rows for sft: the answers of the published rows have no `<think>` part, which the reward asks for."""
    with open(data / "sft.jsonl", "w", encoding="utf-8") as file:
        for line in (data / "ViVQA-X_train_grpo.jsonl").read_text(encoding="utf-8").splitlines()[:SFT_ROWS]:
            row = json.loads(line)
            thought = row["explanations"][1]
            row["conversations"][1]["value"] = f"<think>{thought}</think>" + row["conversations"][1]["value"]
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def main():
    data, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    first_rows(data)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(data), trainer)
    tokenizer.add_special_tokens(CONTROL + MEDIA)
    tokenizer.save(str(out / "tokenizer.json"))
    vocab = tokenizer.get_vocab_size()
    added = {str(tokenizer.token_to_id(t)): {"content": t, "special": True} for t in CONTROL + MEDIA}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": added,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 2048,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    end = tokenizer.token_to_id("<|im_end|>")
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    (out / "preprocessor_config.json").write_text(
        json.dumps({"size": SIDE, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]})
    )
    model = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "template": "internvl2_5",
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "select_layer": -1,
        "force_image_size": SIDE,
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 1,
        "torch_dtype": "float32",
        "llm_config": {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": vocab,
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "initializer_range": 0.05,
            "eos_token_id": end,
        },
        "vision_config": {
            "architectures": ["InternVisionModel"],
            "model_type": "intern_vit_6b",
            "image_size": SIDE,
            "patch_size": PATCH,
            "num_channels": 3,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "hidden_act": "gelu",
            "norm_type": "layer_norm",
            "qk_normalization": False,
            "qkv_bias": True,
            "layer_norm_eps": 1e-6,
            "initializer_factor": 1.0,
            "initializer_range": 0.05,
        },
    }
    (out / "config.json").write_text(json.dumps(model, indent=1, ensure_ascii=False))
    print(f"{vocab} tokens")


if __name__ == "__main__":
    main()
