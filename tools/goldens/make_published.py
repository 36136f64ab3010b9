"""Names and shapes of every tensor of the published sizes, from transformers on the meta device, and the configs used."""

import re

import torch
from fixtures import OUT, model_classes, published, write_json
from transformers import AutoConfig

PUBLISHED = OUT / "published"

# size -> hidden, intermediate, layers, heads, kv heads, vocabulary, tied
QWEN2_VL = {
    "2B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "72B": (8192, 29568, 80, 64, 8, 152064, False),
}
# The last number is the tower's intermediate size.
QWEN2_5_VL = {
    "3B": (2048, 11008, 36, 16, 2, 151936, True, 3420),
    "7B": (3584, 18944, 28, 28, 4, 152064, False, 3420),
    "32B": (5120, 27648, 64, 40, 8, 152064, False, 3456),
    "72B": (8192, 29568, 80, 64, 8, 152064, False, 3456),
}


def text_fields(hidden, intermediate, layers, heads, kv_heads, vocab, tied, max_positions):
    return dict(
        attention_dropout=0.0, bos_token_id=151643, eos_token_id=151645, vision_start_token_id=151652,
        vision_end_token_id=151653, vision_token_id=151654, image_token_id=151655, video_token_id=151656,
        hidden_act="silu", hidden_size=hidden, initializer_range=0.02, intermediate_size=intermediate,
        max_position_embeddings=max_positions, max_window_layers=layers, num_attention_heads=heads,
        num_hidden_layers=layers, num_key_value_heads=kv_heads, rms_norm_eps=1e-6, rope_theta=1000000.0,
        sliding_window=32768, tie_word_embeddings=tied, torch_dtype="bfloat16", use_cache=True,
        use_sliding_window=False, vocab_size=vocab, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
    )


def configs() -> dict:
    out = {}
    for size, numbers in QWEN2_VL.items():
        out[f"qwen2_vl_{size}"] = dict(
            architectures=["Qwen2VLForConditionalGeneration"], model_type="qwen2_vl",
            **text_fields(*numbers, max_positions=32768),
            vision_config=dict(
                depth=32, embed_dim=1280, mlp_ratio=4, num_heads=16, in_chans=3, hidden_size=numbers[0], patch_size=14,
                spatial_merge_size=2, spatial_patch_size=14, temporal_patch_size=2,
            ),
        )
    for size, (*numbers, tower_intermediate) in QWEN2_5_VL.items():
        text, vision = text_fields(*numbers, max_positions=128000), dict(
            depth=32, hidden_act="silu", hidden_size=1280, intermediate_size=tower_intermediate, num_heads=16,
            in_chans=3, out_hidden_size=numbers[0], patch_size=14, spatial_merge_size=2, spatial_patch_size=14,
            window_size=112, fullatt_block_indexes=[7, 15, 23, 31], tokens_per_second=2, temporal_patch_size=2,
        )
        if size == "32B":
            # This one leaves the tower's constants to the class defaults.
            vision = {k: vision[k] for k in (
                "hidden_size", "intermediate_size", "out_hidden_size", "in_chans", "spatial_patch_size",
                "tokens_per_second",
            )}
            text["rope_scaling"] = {"type": "default", "rope_type": "default", "mrope_section": [16, 24, 24]}
        out[f"qwen2_5_vl_{size}"] = dict(
            architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl", **text, vision_config=vision,
        )
    return out


def tensor_list(family, directory):
    """[[name with {i} for the layer index, shape, number of layers or 0]], in order of first appearance."""
    config = AutoConfig.from_pretrained(directory)
    _, model_class = model_classes(family)
    with torch.device("meta"):
        model = model_class(config)
    tied = config.tie_word_embeddings
    assert tied == (model.lm_head.weight is model.model.language_model.embed_tokens.weight)
    rows, total = {}, 0
    for n, p in model.named_parameters():
        name = published(n)
        total += p.numel()
        pattern = re.sub(r"\b(layers|blocks)\.(\d+)\.", r"\1.{i}.", name)
        rows.setdefault((pattern, tuple(p.shape)), set()).add(name)
    assert len({pattern for pattern, _ in rows}) == len(rows)
    return dict(
        tied=tied, parameters=total,
        tensors=[[p, list(s), len(names) if "{i}" in p else 0] for (p, s), names in rows.items()],
    )


def main():
    lines = []
    for key, config in configs().items():
        directory = PUBLISHED / key
        write_json(directory / "config.json", config)
        result = tensor_list(key.rsplit("_", 1)[0], directory)
        print(key, result["parameters"], len(result["tensors"]))
        rows = ",\n".join("  " + str(r).replace("'", '"') for r in result["tensors"])
        lines.append(
            f'"{key}": {{"tied": {str(result["tied"]).lower()}, "parameters": {result["parameters"]}, '
            f'"tensors": [\n{rows}\n]}}'
        )
    (PUBLISHED / "tensors.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
