"""Writes the random checkpoint (once) and the rows and images of a workload under bench/peer/scratch/.

    python make_workload.py --workload image1
    python make_workload.py --workload smollm2_16 --tokenizer DIR

Text models of published sizes have random weights and the tokenizer in DIR, which has at most as many tokens as they. Writes the same rows twice: train.jsonl in the `conversations` format, trl.jsonl in TRL's. One seed determines everything.
"""

import argparse
import json
import random

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from workloads import HERE, IMAGE_PX, IMAGE_TOKENS, NUM_ROWS, SEED, WORK, WORKLOADS, model_of

VOCAB = 2048
CONTROL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]
ID = {token: VOCAB - len(CONTROL) + i for i, token in enumerate(CONTROL)}

WORDS = "time year people way day man thing woman life child world school state family student group country problem hand part".split()

# Splitting rule of the Qwen tokenizers.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if loop.first and message.role != 'system' -%}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif part.type == 'text' -%}{{- part.text -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def qwen2_5_vl() -> dict:
    """Creates a model of about 28 M parameters: 23.6 M decoder with tied embedding, 4.5 M tower and merger; the published flat form."""
    return dict(
        architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl", attention_dropout=0.0,
        bos_token_id=ID["<|endoftext|>"], eos_token_id=ID["<|im_end|>"],
        vision_start_token_id=ID["<|vision_start|>"], vision_end_token_id=ID["<|vision_end|>"],
        vision_token_id=ID["<|vision_pad|>"], image_token_id=ID["<|image_pad|>"], video_token_id=ID["<|video_pad|>"],
        hidden_act="silu", hidden_size=512, initializer_range=0.02, intermediate_size=1408,
        max_position_embeddings=32768, max_window_layers=8, num_attention_heads=8, num_hidden_layers=8,
        num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=32768,
        tie_word_embeddings=True, torch_dtype="float32", transformers_version="4.41.2", use_cache=True,
        use_sliding_window=False, vocab_size=VOCAB, rope_scaling={"type": "mrope", "mrope_section": [8, 12, 12]},
        vision_config=dict(
            depth=4, hidden_act="silu", hidden_size=256, intermediate_size=512, num_heads=4, in_chans=3,
            out_hidden_size=512, patch_size=14, spatial_merge_size=2, spatial_patch_size=14, window_size=112,
            fullatt_block_indexes=[1, 3], tokens_per_second=2, temporal_patch_size=2,
        ),
    )


def qwen3_5() -> dict:
    """Creates a model of about 32 M parameters: six blocks with the delta rule and two with attention, in heads of the published widths."""
    return dict(
        architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", transformers_version="4.57.0.dev0",
        image_token_id=ID["<|image_pad|>"], video_token_id=ID["<|video_pad|>"], tie_word_embeddings=True,
        vision_start_token_id=ID["<|vision_start|>"], vision_end_token_id=ID["<|vision_end|>"],
        text_config=dict(
            attention_bias=False, attention_dropout=0.0, attn_output_gate=True, dtype="float32", eos_token_id=ID["<|im_end|>"],
            full_attention_interval=4, head_dim=256, hidden_act="silu", hidden_size=512, initializer_range=0.02,
            intermediate_size=1152, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=4,
            linear_num_value_heads=4, linear_value_head_dim=128, mamba_ssm_dtype="float32", max_position_embeddings=32768,
            model_type="qwen3_5_text", num_attention_heads=4, num_hidden_layers=8, num_key_value_heads=1, rms_norm_eps=1e-6,
            rope_parameters=dict(
                mrope_interleaved=True, mrope_section=[11, 11, 10], partial_rotary_factor=0.25, rope_theta=10000000, rope_type="default",
            ),
            tie_word_embeddings=True, use_cache=True, vocab_size=VOCAB,
        ),
        vision_config=dict(
            deepstack_visual_indexes=[], depth=4, hidden_act="gelu_pytorch_tanh", hidden_size=256, in_channels=3,
            initializer_range=0.02, intermediate_size=512, model_type="qwen3_5", num_heads=4, num_position_embeddings=2304,
            out_hidden_size=512, patch_size=16, spatial_merge_size=2, temporal_patch_size=2,
        ),
    )


# By checkpoint: its config.json, the classes of transformers, the millions of parameters, and what its images are scaled by.
MODELS = {
    "model": (
        qwen2_5_vl, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, (27.5, 28.5),
        dict(
            min_pixels=3136, max_pixels=12845056, patch_size=14, temporal_patch_size=2, merge_size=2,
            image_mean=[0.48145466, 0.4578275, 0.40821073], image_std=[0.26862954, 0.26130258, 0.27577711],
            image_processor_type="Qwen2VLImageProcessor", processor_class="Qwen2_5_VLProcessor",
        ),
    ),
    "qwen3_5": (
        qwen3_5, Qwen3_5Config, Qwen3_5ForConditionalGeneration, (30.0, 34.0),
        dict(
            size=dict(longest_edge=16777216, shortest_edge=65536), patch_size=16, temporal_patch_size=2, merge_size=2,
            image_mean=[0.5] * 3, image_std=[0.5] * 3,
            image_processor_type="Qwen2VLImageProcessorFast", processor_class="Qwen3VLProcessor",
        ),
    ),
}


def pseudo_words(rng: random.Random) -> list[str]:
    """Returns enough different words for the merges to fill the vocabulary; most become one token."""
    syllables = [c + v for c in "bcdfghjklmnprstvwz" for v in "aeiou"]
    return sorted({"".join(rng.choices(syllables, k=rng.choice((2, 3)))) for _ in range(1200)})


def build_tokenizer(words: list[str]) -> Tokenizer:
    """Writes a byte-level BPE in Qwen's form: 256 bytes, merges, control tokens; every id below VOCAB is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(CONTROL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    # The template's words are frequent, so they are merged first.
    frequent = ["You are a helpful assistant.", "system", "user", "assistant", "Describe"] * 50
    tokenizer.train_from_iterator(frequent + [f" {word} {word}" for word in words], trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    assert tokenizer.get_vocab_size() == VOCAB and all(tokenizer.token_to_id(t) == i for t, i in ID.items())
    return tokenizer


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1) + "\n")


def write_text_model(directory, tokenizer):
    """Writes random weights in a published size, in float32."""
    published = HERE.parents[1] / "crates/models/tests/golden/published" / directory.name / "config.json"
    config = AutoConfig.for_model(**json.loads(published.read_text()))
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    print(f"{directory}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")


def write_model(directory, words: list[str]):
    config, of_config, of_model, (least, most), images = MODELS[directory.name]
    raw = config()
    keep = {k: v for k, v in raw.items() if k not in ("architectures", "model_type", "transformers_version")}
    torch.manual_seed(SEED)
    model = of_model._from_config(of_config(**keep), dtype=torch.float32)
    num_parameters = sum(p.numel() for p in model.parameters()) / 1e6
    assert least < num_parameters < most, num_parameters
    model.save_pretrained(directory)
    # The published form, which transformers does not write.
    write_json(directory / "config.json", raw)
    build_tokenizer(words).save(str(directory / "tokenizer.json"), pretty=False)
    write_json(directory / "tokenizer_config.json", dict(
        add_prefix_space=False, additional_special_tokens=CONTROL[1:], bos_token=None,
        added_tokens_decoder={
            str(i): dict(content=t, lstrip=False, normalized=False, rstrip=False, single_word=False, special=True)
            for t, i in ID.items()
        },
        clean_up_tokenization_spaces=False, eos_token="<|im_end|>", errors="replace", model_max_length=32768,
        pad_token="<|endoftext|>", split_special_tokens=False, tokenizer_class="Qwen2Tokenizer", unk_token=None,
    ))
    write_json(directory / "chat_template.json", {"chat_template": CHAT_TEMPLATE})
    write_json(directory / "preprocessor_config.json", images)
    write_json(directory / "generation_config.json", dict(
        bos_token_id=ID["<|endoftext|>"], pad_token_id=ID["<|endoftext|>"],
        eos_token_id=[ID["<|im_end|>"], ID["<|endoftext|>"]], transformers_version="4.41.2",
    ))
    print(f"{directory}: {num_parameters:.2f} M parameters")


def image(rng: np.random.Generator) -> Image.Image:
    """Draws smooth colours, so that the file is about as large as a photograph's."""
    coarse = Image.fromarray(rng.integers(0, 256, (28, 28, 3), dtype=np.uint8))
    return coarse.resize((IMAGE_PX, IMAGE_PX), Image.Resampling.BICUBIC)


def write_rows(name: str, words: list[str]):
    workload, root = WORKLOADS[name], WORK / name
    processor = (AutoProcessor if workload.sees else AutoTokenizer).from_pretrained(model_of(name))
    tokenizer = processor.tokenizer if workload.sees else processor
    words = [f" {word}" for word in words if len(tokenizer(f" {word}")["input_ids"]) == 1]
    rng, pixel_rng = random.Random(SEED), np.random.default_rng(SEED)
    (root / "images").mkdir(parents=True, exist_ok=True)

    def prompt_ids(question: str) -> list[int]:
        parts = [{"type": "image"}] * workload.num_images + [{"type": "text", "text": question}] if workload.sees else question
        text = processor.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
        )
        return tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * IMAGE_TOKENS.get(workload.model, 0)))["input_ids"]

    num_words = workload.prompt_tokens - len(prompt_ids("Describe"))
    assert num_words > 0, f"{name}: the template alone is {-num_words} tokens too long"
    ours, theirs = [], []
    for row in range(NUM_ROWS):
        paths = [f"images/{row}-{i}.png" for i in range(workload.num_images)]
        for path in paths:
            image(pixel_rng).save(root / path)
        question, answer = "Describe" + "".join(rng.choices(words, k=num_words)), rng.choice(words).strip()
        assert len(prompt_ids(question)) == workload.prompt_tokens
        media, their_media = ({"image": paths}, {"images": paths}) if paths else ({}, {})
        turns = [{"from": "human", "value": "<image>" * len(paths) + question}, {"from": "gpt", "value": answer}]
        ours.append({"id": f"{name}-{row}", **media, "conversations": turns})
        theirs.append({"prompt": [{"role": "user", "content": question}], **their_media})
    for file, rows in (("train.jsonl", ours), ("trl.jsonl", theirs)):
        (root / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{root}: {NUM_ROWS} rows of {workload.prompt_tokens} prompt tokens, {workload.num_images} images each")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--tokenizer", help="folder with the tokenizer of a text model")
    args = parser.parse_args()
    directory = model_of(args.workload)
    words = pseudo_words(random.Random(SEED))
    if not (directory / "generation_config.json").is_file():
        directory.mkdir(parents=True, exist_ok=True)
        if WORKLOADS[args.workload].sees:
            write_model(directory, words)
        else:
            write_text_model(directory, AutoTokenizer.from_pretrained(args.tokenizer))
    # Pseudo-words that are one token fill the prompts of our own tokenizer, plain words those of another.
    write_rows(args.workload, words if WORKLOADS[args.workload].sees else WORDS)


if __name__ == "__main__":
    main()
