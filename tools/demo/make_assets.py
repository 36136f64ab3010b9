"""Configuration, tokenizer and processor of the embedded checkpoint: crates/demo/assets/model/ without the weights.

    cargo run -p omnigrpo-demo --example task -- runs/demo-data
    python tools/demo/make_assets.py runs/demo-data/sft.jsonl

Needs the package `tokenizers` (0.22 was used); nothing of it runs in the product. The weights come from `omnigrpo sft`
with examples/demo/sft.yaml.
"""

import json
import re
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

OUT = Path(__file__).resolve().parents[2] / "crates/demo/assets/model"

# Qwen's control tokens; marked special, so text cannot forge them.
CONTROL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]
# Vocabulary like any other, one token each.
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]

# A word is the same token wherever it stands (Qwen's own pattern ties the space before a word to it), so "blue" in an
# option, in a thought and in an answer share one embedding.
PIECES = r"[A-Za-z]+|[0-9]|[^A-Za-z0-9]+"

# Qwen2.5-VL's template without a default system turn, which would double the length of these prompts.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'video' -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif part['type'] == 'text' -%}
{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def train_tokenizer(rows: list[dict]) -> Tokenizer:
    """Byte-level BPE; every byte is a token, and so is every word of the questions and answers."""
    turns = {turn["value"] for row in rows for turn in row["conversations"]}
    texts = {"system", "user", "assistant"}.union(*(re.split(r"<[a-z/]+>", turn) for turn in turns))
    # Each piece counts alike, so that ids do not depend on how many questions there are.
    pieces = sorted({piece for text in texts for piece in re.findall(PIECES, text)})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600, min_frequency=1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(pieces, trainer)
    assert all(len(tokenizer.encode(piece).ids) == 1 for piece in pieces)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    return tokenizer


def config(tokenizer: Tokenizer) -> dict:
    def token(name):
        return tokenizer.token_to_id(f"<|{name}|>")

    hidden = 128
    # Two values are not the published ones. Weights begin at about one over the root of the width, without which a model
    # this narrow takes many times longer to connect options with letters; and prompts of fifty tokens need no slow
    # rotations.
    return dict(
        architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl", attention_dropout=0.0,
        bos_token_id=token("endoftext"), eos_token_id=token("im_end"), vision_start_token_id=token("vision_start"),
        vision_end_token_id=token("vision_end"), vision_token_id=token("vision_pad"),
        image_token_id=token("image_pad"), video_token_id=token("video_pad"), hidden_act="silu", hidden_size=hidden,
        initializer_range=0.1, intermediate_size=384, max_position_embeddings=2048, max_window_layers=4,
        num_attention_heads=4, num_hidden_layers=4, num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1000.0,
        sliding_window=2048, tie_word_embeddings=True, torch_dtype="float32", use_cache=True,
        use_sliding_window=False, vocab_size=tokenizer.get_vocab_size(),
        rope_scaling=dict(type="mrope", mrope_section=[4, 6, 6]),
        vision_config=dict(
            depth=4, hidden_act="silu", hidden_size=64, intermediate_size=192, num_heads=4, in_chans=3,
            out_hidden_size=hidden, patch_size=14, spatial_merge_size=2, spatial_patch_size=14, window_size=56,
            fullatt_block_indexes=[1, 3], tokens_per_second=2, temporal_patch_size=2,
        ),
    )


def tokenizer_config(tokenizer: Tokenizer) -> dict:
    added = {
        str(tokenizer.token_to_id(t)): dict(
            content=t, lstrip=False, normalized=False, rstrip=False, single_word=False, special=t in CONTROL
        )
        for t in CONTROL + TAGS
    }
    return dict(
        # Not Qwen2Tokenizer: recent `transformers` give that class Qwen's own pattern whatever tokenizer.json says.
        tokenizer_class="PreTrainedTokenizerFast", added_tokens_decoder=added, additional_special_tokens=CONTROL[1:],
        bos_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token=None, model_max_length=2048,
        clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE,
    )


def write(name: str, value: dict):
    (OUT / name).write_text(json.dumps(value, indent=2) + "\n")


def main():
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    OUT.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(rows)
    tokenizer.save(str(OUT / "tokenizer.json"))
    write("tokenizer_config.json", tokenizer_config(tokenizer))
    write("config.json", config(tokenizer))
    im_end, end = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    write("generation_config.json", dict(bos_token_id=end, pad_token_id=end, eos_token_id=[im_end, end]))
    write("preprocessor_config.json", dict(
        min_pixels=56 * 56, max_pixels=84 * 84, patch_size=14, temporal_patch_size=2, merge_size=2,
        image_mean=[0.48145466, 0.4578275, 0.40821073], image_std=[0.26862954, 0.26130258, 0.27577711],
        image_processor_type="Qwen2VLImageProcessor", processor_class="Qwen2_5_VLProcessor",
    ))


if __name__ == "__main__":
    main()
