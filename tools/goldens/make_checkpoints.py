"""Writes the tiny checkpoints in the published (hub) layout, and three variants of the layout."""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from fixtures import (
    ADDED, CHECKPOINTS, EOT, ID, IM_END, MAX_PIXELS, MIN_PIXELS, NAMES, NUM_MERGES, SPECIAL, VOCAB, family_of,
    hub_config, load_model, new_model, parameters, save_tensors, write_json,
)
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

# The splitting rule of the Qwen tokenizers.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CORPUS = [
    "You are a helpful assistant.", "system", "user", "assistant", "user", "assistant", "system",
    "What is shown in the image?", "Which way does the ball move in the video?", "How many shapes are there?",
    "The answer is", " red", " blue", " left", " right", "You are a helpful assistant.",
]

DEFAULT_SYSTEM = (
    "{%- if loop.first and message.role != 'system' -%}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}"
    "{%- endif -%}"
)
# Same output as the published template on string and typed content, written for this project.
CHAT_TEMPLATE = (
    "{%- set seen = namespace(image=0, video=0) -%}"
    "{%- for message in messages -%}"
    + DEFAULT_SYSTEM +
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}"
    "{{- message.content -}}"
    "{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}"
    "{%- set seen.image = seen.image + 1 -%}"
    "{%- if add_vision_id -%}{{- 'Picture ' + seen.image|string + ': ' -}}{%- endif -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif part.type == 'video' or 'video' in part -%}"
    "{%- set seen.video = seen.video + 1 -%}"
    "{%- if add_vision_id -%}{{- 'Video ' + seen.video|string + ': ' -}}{%- endif -%}"
    "{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- elif 'text' in part -%}"
    "{{- part.text -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def byte_level_bpe(texts, merges: int, special, added) -> Tokenizer:
    """Byte-level BPE as in Qwen: 256 bytes, merges learned from texts, control tokens, then ordinary added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=256 + merges, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    return tokenizer


def build_tokenizer() -> Tokenizer:
    tokenizer = byte_level_bpe(CORPUS, NUM_MERGES, SPECIAL, ADDED)
    assert all(tokenizer.token_to_id(t) == i for t, i in ID.items()) and max(ID.values()) < VOCAB
    return tokenizer


def tokenizer_config(with_template: bool) -> dict:
    added = {
        str(i): dict(content=t, lstrip=False, normalized=False, rstrip=False, single_word=False, special=t in SPECIAL)
        for t, i in ID.items()
    }
    config = dict(
        add_prefix_space=False, added_tokens_decoder=added, additional_special_tokens=SPECIAL[1:], bos_token=None,
        clean_up_tokenization_spaces=False, eos_token="<|im_end|>", errors="replace", model_max_length=512,
        pad_token="<|endoftext|>", split_special_tokens=False, tokenizer_class="Qwen2Tokenizer", unk_token=None,
    )
    if with_template:
        config["chat_template"] = CHAT_TEMPLATE
    return config


def write_sidecars(directory: Path, name: str):
    """Tokenizer, processor and generation files; the template goes where different releases put it."""
    build_tokenizer().save(str(directory / "tokenizer.json"), pretty=False)
    write_json(directory / "tokenizer_config.json", tokenizer_config(with_template=name == "qwen2_vl_untied"))
    if name in ("qwen2_vl_tied", "qwen2_5_vl_untied"):
        write_json(directory / "chat_template.json", {"chat_template": CHAT_TEMPLATE})
    elif name != "qwen2_vl_untied":
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    write_json(directory / "preprocessor_config.json", dict(
        min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS, patch_size=14, temporal_patch_size=2, merge_size=2,
        image_mean=[0.48145466, 0.4578275, 0.40821073], image_std=[0.26862954, 0.26130258, 0.27577711],
        image_processor_type="Qwen2VLImageProcessor",
        processor_class="Qwen2_5_VLProcessor" if family_of(name) == "qwen2_5_vl" else "Qwen2VLProcessor",
    ))
    # Sampling fields that would wreck a rollout if anybody read them.
    write_json(directory / "generation_config.json", dict(
        bos_token_id=EOT, pad_token_id=EOT, do_sample=True, eos_token_id=[IM_END, EOT], repetition_penalty=1.05,
        temperature=1e-6, top_p=0.001, top_k=1, transformers_version="4.41.2",
    ))


def write_checkpoint(name: str):
    directory = CHECKPOINTS / name
    shutil.rmtree(directory, ignore_errors=True)
    model = new_model(name)
    model.save_pretrained(directory, max_shard_size="220KB" if name == "qwen2_5_vl_untied" else "5GB")
    write_json(directory / "config.json", hub_config(name))
    write_sidecars(directory, name)
    same_as(load_model(name), model)
    return model


def same_as(loaded, model):
    expected, got = parameters(model), parameters(loaded)
    assert expected.keys() == got.keys(), expected.keys() ^ got.keys()
    for n, p in expected.items():
        assert torch.equal(p, got[n]), n


def write_variants():
    """in_memory: names of `state_dict()` and a nested `text_config`; bf16: weights rounded to bfloat16."""
    source = load_model("qwen2_vl_tied")
    directory = CHECKPOINTS / "qwen2_vl_tied_in_memory"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    state = source.state_dict()
    state.pop("lm_head.weight", None)
    save_tensors(directory / "model.safetensors", state, format="pt")
    with tempfile.TemporaryDirectory() as scratch:
        source.config.save_pretrained(scratch)
        config = json.loads((Path(scratch) / "config.json").read_text())
    assert "text_config" in config and "hidden_size" not in config
    write_json(directory / "config.json", config)
    write_sidecars(directory, "qwen2_vl_tied")
    same_as(load_model("qwen2_vl_tied", directory), source)

    source = load_model("qwen2_5_vl_tied")
    directory = CHECKPOINTS / "qwen2_5_vl_tied_bf16"
    shutil.rmtree(directory, ignore_errors=True)
    source.bfloat16().save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    write_json(directory / "config.json", {**hub_config("qwen2_5_vl_tied"), "torch_dtype": "bfloat16"})
    write_sidecars(directory, "qwen2_5_vl_tied")


def main():
    for name in NAMES:
        write_checkpoint(name)
    write_variants()


if __name__ == "__main__":
    main()
