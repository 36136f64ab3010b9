"""Writes a small Qwen3.5 without weights, with the tokenizer and the pictures of the demo's model."""

import json
import shutil
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "crates/demo/assets/model"


def write_checkpoint(place, hidden=128, wide=384, layers=4, heads=4, kv=2, vocab=None, initializer_range=0.1, tower=64):
    """Writes a model directory. Every fourth block attends, and the others have the gated delta rule."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(DEMO, place, ignore=shutil.ignore_patterns("*.safetensors"))
    demo = json.loads((place / "config.json").read_text())
    width = hidden // heads
    # Three positions share the pairs of columns that rotate, which are half of the columns of a head.
    pairs = width // 4
    text = dict(
        model_type="qwen3_5_text", hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=width, hidden_act="silu", attn_output_gate=True, full_attention_interval=4, rms_norm_eps=1e-6,
        linear_num_key_heads=heads // 2, linear_num_value_heads=heads, linear_key_head_dim=width, linear_value_head_dim=width,
        linear_conv_kernel_dim=4, vocab_size=vocab or demo["vocab_size"], max_position_embeddings=32_768,
        eos_token_id=demo["eos_token_id"], initializer_range=initializer_range, tie_word_embeddings=True, dtype="float32",
        rope_parameters=dict(
            rope_type="default", rope_theta=demo["rope_theta"], partial_rotary_factor=0.5, mrope_interleaved=True,
            mrope_section=[pairs - 2 * (pairs // 4), pairs // 4, pairs // 4],
        ),
    )
    vision = dict(
        model_type="qwen3_5", depth=4, hidden_size=tower, intermediate_size=3 * tower, num_heads=4, in_channels=3, out_hidden_size=hidden,
        patch_size=14, spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=36, deepstack_visual_indexes=[],
        hidden_act="gelu_pytorch_tanh", initializer_range=initializer_range,
    )
    ids = {key: demo[key] for key in ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")}
    write(place / "config.json", dict(
        architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", text_config=text, vision_config=vision,
        tie_word_embeddings=True, **ids,
    ))
    processor = json.loads((place / "preprocessor_config.json").read_text())
    sizes = dict(shortest_edge=processor.pop("min_pixels"), longest_edge=processor.pop("max_pixels"))
    processor.update(size=sizes, processor_class="Qwen3VLProcessor")
    write(place / "preprocessor_config.json", processor | dict(image_processor_type="Qwen2VLImageProcessorFast"))
    del processor["image_processor_type"]
    write(place / "video_preprocessor_config.json", processor | dict(video_processor_type="Qwen3VLVideoProcessor"))


def write(path, value):
    path.write_text(json.dumps(value, indent=1) + "\n")
