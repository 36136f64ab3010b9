"""Writes examples/humanomni/model: configuration, tokenizer and processor files of a small HumanOmni, without weights.

`omnigrpo sft --init_weights SEED` starts from it. The vocabulary is learned from the sentences of the talking clips.
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "examples/humanomni/model"
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{%- if messages[0].role != 'system' -%}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
BERT_WORDS = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] as an emotional recognition expert ; throughout the video , which emotion conveyed by "
    "characters is most obvious to you ? output thinking process in < think > / and final answer tags ."
).split()


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def tokenizer(sentences):
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    t.post_processor = processors.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    t.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=509, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    t.train_from_iterator(sentences, trainer)
    t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    assert t.get_vocab_size() <= 512, t.get_vocab_size()
    return t


def main(rows):
    sentences = ["system\nYou are a helpful assistant.", "user\n<vi_start><vi_end>\n<au_start><au_end>\n", "assistant\n"]
    for line in Path(rows).read_text().splitlines():
        sentences += [turn["value"] for turn in json.loads(line)["conversations"]]
    t = tokenizer(sentences)
    OUT.mkdir(parents=True, exist_ok=True)
    t.save(str(OUT / "tokenizer.json"), pretty=False)
    eot, _, end = (t.token_to_id(s) for s in SPECIAL)
    write(OUT / "tokenizer_config.json", dict(
        chat_template=CHAT_TEMPLATE, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=512,
        tokenizer_class="Qwen2Tokenizer",
    ))
    write(OUT / "generation_config.json", dict(bos_token_id=eot, pad_token_id=eot, eos_token_id=[end, eot]))
    write(OUT / "config.json", dict(
        architectures=["HumanOmniQwen2ForCausalLM"], model_type="HumanOmni_qwen2", bos_token_id=eot, eos_token_id=end,
        hidden_act="silu", hidden_size=96, initializer_range=0.08, intermediate_size=256, max_position_embeddings=512,
        num_attention_heads=4, num_hidden_layers=3, num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=10000.0,
        tie_word_embeddings=True, torch_dtype="float32", use_sliding_window=False, vocab_size=512,
        image_aspect_ratio="pad", mm_hidden_size=48, mm_projector_type="all_in_one_small",
        mm_audio_projector_type="mlp2x_gelu", mm_vision_select_layer=-2, mm_vision_select_feature="patch",
        mm_use_x_start_end=True, num_frames=4, mm_vision_tower="siglip", mm_audio_tower="whisper", mm_text_tower="bert",
    ))
    write(OUT / "siglip/config.json", dict(
        model_type="siglip_vision_model", hidden_size=48, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=3, image_size=32, patch_size=8, vision_use_head=False,
    ))
    write(OUT / "siglip/preprocessor_config.json", dict(
        image_processor_type="SiglipImageProcessor", image_mean=[0.5] * 3, image_std=[0.5] * 3, resample=3,
        rescale_factor=1 / 255, size=dict(height=32, width=32),
    ))
    write(OUT / "whisper/config.json", dict(
        model_type="whisper", d_model=48, encoder_layers=2, encoder_attention_heads=3, encoder_ffn_dim=96,
        num_mel_bins=40, max_source_positions=25, activation_function="gelu",
    ))
    write(OUT / "whisper/preprocessor_config.json", dict(
        feature_extractor_type="WhisperFeatureExtractor", feature_size=40, sampling_rate=16000, hop_length=320,
        chunk_length=1, n_fft=640, padding_side="right", padding_value=0.0,
    ))
    write(OUT / "bert/config.json", dict(
        model_type="bert", hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=len(BERT_WORDS), max_position_embeddings=80, hidden_act="gelu", type_vocab_size=2, pad_token_id=0,
    ))
    (OUT / "bert/vocab.txt").write_text("\n".join(BERT_WORDS) + "\n")
    write(OUT / "bert/tokenizer_config.json", dict(do_lower_case=True, tokenizer_class="BertTokenizer"))


if __name__ == "__main__":
    main(sys.argv[1])
