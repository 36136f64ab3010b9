"""Names and shapes of every tensor of the published sizes, from transformers on the meta device, and the configs used."""

import copy
import math
import re
from collections import Counter

import torch
from fixtures import OUT, model_classes, oriented, published, write_json
from make_aria import published_name as aria_name
from make_omni import published_name as omni_name
from transformers import (
    AriaForConditionalGeneration, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText,
    InternVLForConditionalGeneration, LlamaConfig, Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniThinkerForConditionalGeneration, Qwen2AudioForConditionalGeneration, Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration,
)

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


# size -> hidden, intermediate, layers, heads, kv heads; the 38B one has the 6B tower with RMS norms.
INTERNVL3 = {
    "1B": (896, 4864, 24, 14, 2), "2B": (1536, 8960, 28, 12, 2), "8B": (3584, 18944, 28, 28, 4),
    "14B": (5120, 13824, 48, 40, 8), "38B": (5120, 27648, 64, 40, 8),
}


# InternVL3.5, on Qwen3; all have 8 key and value heads.
INTERNVL3_5 = {
    "1B": (1024, 3072, 28, 16), "2B": (2048, 6144, 28, 16), "4B": (2560, 9728, 36, 32), "8B": (4096, 12288, 36, 32),
    "14B": (5120, 17408, 40, 40), "38B": (5120, 25600, 64, 64),
}


def internvl3_5_text(hidden, intermediate, layers, heads):
    return dict(
        architectures=["Qwen3ForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=151643,
        eos_token_id=151645, head_dim=128, hidden_act="silu", hidden_size=hidden, initializer_range=0.02,
        intermediate_size=intermediate, max_position_embeddings=40960, max_window_layers=layers, model_type="qwen3",
        num_attention_heads=heads, num_hidden_layers=layers, num_key_value_heads=8, rms_norm_eps=1e-6,
        rope_scaling=None, rope_theta=1000000.0, sliding_window=None, torch_dtype="bfloat16", use_cache=True,
        use_sliding_window=False, vocab_size=151936,
    )


def internvl_text(hidden, intermediate, layers, heads, kv_heads):
    return dict(
        architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, bos_token_id=151643, eos_token_id=151645,
        hidden_act="silu", hidden_size=hidden, initializer_range=0.02, intermediate_size=intermediate,
        max_position_embeddings=32768, max_window_layers=70, model_type="qwen2", num_attention_heads=heads,
        num_hidden_layers=layers, num_key_value_heads=kv_heads, rms_norm_eps=1e-6,
        rope_scaling={"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}, rope_theta=1000000.0,
        sliding_window=None, torch_dtype="bfloat16", use_cache=True, use_sliding_window=False, vocab_size=151674,
    )


def internvl_tower(large):
    width = dict(hidden_size=3200, intermediate_size=12800, num_attention_heads=25, num_hidden_layers=45) if large else \
        dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_hidden_layers=24)
    return width | dict(
        architectures=["InternVisionModel"], attention_dropout=0.0, hidden_act="gelu", layer_norm_eps=1e-6,
        norm_type="rms_norm" if large else "layer_norm",
    )


def internvl_configs() -> dict:
    """Both layouts of each size. Published hf files do not say that the head is not tied; the tests' copies do, since there
    are no tensors beside them to tell."""
    out = {}
    models = {size: (internvl_text(*numbers), size == "38B") for size, numbers in INTERNVL3.items()}
    models |= {f"3.5_{size}": (internvl3_5_text(*numbers), size == "38B") for size, numbers in INTERNVL3_5.items()}
    models["3.5_30B-A3B"] = internvl3_5_text(2048, 6144, 48, 32) | mixture(768) | dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_key_value_heads=4,
    ), False
    for size, (text, large) in models.items():
        out[f"internvl_hf_{size}"] = dict(
            architectures=["InternVLForConditionalGeneration"], downsample_ratio=0.5, image_seq_length=256,
            # The largest published one has the older key.
            **{"image_token_index" if large else "image_token_id": 151667},
            model_type="internvl", projector_hidden_act="gelu", text_config=text,
            tie_word_embeddings=False, torch_dtype="bfloat16", vision_feature_layer=-1,
            vision_feature_select_strategy="default",
            vision_config=internvl_tower(large) | dict(
                attention_bias=not large, hidden_dropout_prob=0.0, image_size=[448, 448], layer_scale_init_value=0.1,
                model_type="internvl_vision", num_channels=3, patch_size=[14, 14], projection_dropout=0.0,
                use_absolute_position_embeddings=True, use_mask_token=False, use_mean_pooling=True, use_qk_norm=large,
            ),
        )
        out[f"internvl_{size}"] = dict(
            architectures=["InternVLChatModel"], downsample_ratio=0.5, dynamic_image_size=True, force_image_size=448,
            llm_config=text | dict(tie_word_embeddings=False), max_dynamic_patch=12,
            min_dynamic_patch=1, model_type="internvl_chat", pad2square=False, ps_version="v2", select_layer=-1,
            template="internvl2_5", torch_dtype="bfloat16", use_backbone_lora=0, use_llm_lora=0, use_thumbnail=True,
            vision_config=internvl_tower(large) | dict(
                drop_path_rate=0.4 if large else 0.1, dropout=0.0, image_size=448, initializer_factor=0.1,
                initializer_range=1e-10, model_type="intern_vit_6b", patch_size=14, qk_normalization=large,
                qkv_bias=not large, use_flash_attn=True,
            ),
        )
    return out


def internvl_tensors(directory, original) -> dict:
    """As `tensor_list`; the original names by the published table, query, key and value joined."""
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = InternVLForConditionalGeneration(config)
    shapes = {}
    for n, p in model.named_parameters():
        name = "language_model.lm_head.weight" if n == "lm_head.weight" else \
            n.removeprefix("model.").replace("language_model.", "language_model.model.", 1)
        if original:
            name = original_name(name)
        if name is not None:
            rows, shape = 3 if ".attn.qkv." in name else 1, oriented(n, p).shape
            shapes[name] = (shape[0] * rows, *shape[1:])
    rows = {}
    for name, shape in shapes.items():
        pattern = re.sub(r"\b(layers|layer)\.(\d+)\.", r"\1.{i}.", name)
        rows.setdefault((pattern, shape), set()).add(name)
    assert len({pattern for pattern, _ in rows}) == len(rows)
    return dict(
        tied=False, parameters=sum(math.prod(s) for s in shapes.values()),
        tensors=[[p, list(s), len(names) if "{i}" in p else 0] for (p, s), names in rows.items()],
    )


def original_name(name):
    """hf name -> original name; the query projection stands for the joined one."""
    if ".k_proj." in name and "vision" in name or ".v_proj." in name and "vision" in name:
        return None
    name = name.replace("vision_tower.", "vision_model.").replace(".encoder.layer.", ".encoder.layers.")
    for new, old in (
        ("cls_token", "class_embedding"), ("position_embeddings", "position_embedding"),
        ("patch_embeddings.projection.", "patch_embedding."), (".layernorm_before.", ".norm1."),
        (".layernorm_after.", ".norm2."), (".lambda_1", ".ls1"), (".lambda_2", ".ls2"),
        (".attention.projection_layer.", ".attn.proj."), (".attention.q_norm.", ".attn.q_norm."),
        (".attention.k_norm.", ".attn.k_norm."), (".attention.q_proj.", ".attn.qkv."),
        ("multi_modal_projector.layer_norm.", "mlp1.0."), ("multi_modal_projector.linear_1.", "mlp1.1."),
        ("multi_modal_projector.linear_2.", "mlp1.3."),
    ):
        name = name.replace(new, old)
    return name


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


# size -> hidden, intermediate, layers, heads, tied, large tower; the dense ones.
QWEN3_VL = {
    "2B": (2048, 6144, 28, 16, True, False), "4B": (2560, 9728, 36, 32, True, False),
    "8B": (4096, 12288, 36, 32, False, True), "32B": (5120, 25600, 64, 64, False, True),
}


def qwen3_vl_configs() -> dict:
    out = {}
    for size, (hidden, intermediate, layers, heads, tied, large) in QWEN3_VL.items():
        depth, width, inner, deep = (27, 1152, 4304, [8, 16, 24]) if large else (24, 1024, 4096, [5, 11, 17])
        out[f"qwen3_vl_{size}"] = dict(
            architectures=["Qwen3VLForConditionalGeneration"], image_token_id=151655, model_type="qwen3_vl",
            text_config=dict(
                attention_bias=False, attention_dropout=0.0, bos_token_id=151643, dtype="bfloat16",
                eos_token_id=151645, head_dim=128, hidden_act="silu", hidden_size=hidden, initializer_range=0.02,
                intermediate_size=intermediate, max_position_embeddings=262144, model_type="qwen3_vl_text",
                num_attention_heads=heads, num_hidden_layers=layers, num_key_value_heads=8, rms_norm_eps=1e-6,
                rope_scaling=dict(mrope_interleaved=True, mrope_section=[24, 20, 20], rope_type="default"),
                rope_theta=5000000, tie_word_embeddings=tied, use_cache=True, vocab_size=151936,
            ),
            tie_word_embeddings=tied, transformers_version="4.57.0.dev0", video_token_id=151656,
            vision_config=dict(
                deepstack_visual_indexes=deep, depth=depth, hidden_act="gelu_pytorch_tanh", hidden_size=width,
                in_channels=3, initializer_range=0.02, intermediate_size=inner, model_type="qwen3_vl", num_heads=16,
                num_position_embeddings=2304, out_hidden_size=hidden, patch_size=16, spatial_merge_size=2,
                temporal_patch_size=2,
            ),
            vision_end_token_id=151653, vision_start_token_id=151652,
        )
    # The mixtures have the tower of 8B.
    for size, (hidden, intermediate, layers, heads, width) in QWEN3_VL_MOE.items():
        dense = copy.deepcopy(out["qwen3_vl_8B"])
        dense["text_config"] |= mixture(width) | dict(
            hidden_size=hidden, intermediate_size=intermediate, model_type="qwen3_vl_moe_text", num_attention_heads=heads,
            num_hidden_layers=layers, num_key_value_heads=4,
        )
        dense["vision_config"] |= dict(model_type="qwen3_vl_moe", out_hidden_size=hidden)
        out[f"qwen3_vl_{size}"] = dense | dict(
            architectures=["Qwen3VLMoeForConditionalGeneration"], model_type="qwen3_vl_moe",
        )
    return out


# size -> hidden, feed-forward width that no layer uses, layers, heads, width of one expert
QWEN3_VL_MOE = {"30B-A3B": (2048, 6144, 48, 32, 768), "235B-A22B": (4096, 12288, 94, 64, 1536)}


def mixture(width) -> dict:
    return dict(
        decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=width, norm_topk_prob=True, num_experts=128,
        num_experts_per_tok=8,
    )


def qwen3_vl_tensors(directory) -> dict:
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = (Qwen3VLMoeForConditionalGeneration if "moe" in config.model_type else Qwen3VLForConditionalGeneration)(config)
    rows, total = {}, 0
    for n, p in model.named_parameters():
        total += p.numel()
        pattern = re.sub(r"\b(layers|blocks|deepstack_merger_list)\.(\d+)\.", r"\1.{i}.", n)
        rows.setdefault((pattern, tuple(oriented(n, p).shape)), set()).add(n)
    assert len({pattern for pattern, _ in rows}) == len(rows)
    return dict(
        tied=config.tie_word_embeddings, parameters=total,
        tensors=[[p, list(s), len(names) if "{i}" in p else 0] for (p, s), names in rows.items()],
    )


# size -> hidden, layers, heads, key and value heads, feed-forward, value heads of the delta rule, tied, tower
QWEN3_5 = {
    "0.8B": (1024, 24, 8, 2, 3584, 16, True, (12, 768, 12, 3072)),
    "2B": (2048, 24, 8, 2, 6144, 16, True, (24, 1024, 16, 4096)),
    "4B": (2560, 32, 16, 4, 9216, 32, True, (24, 1024, 16, 4096)),
    "9B": (4096, 32, 16, 4, 12288, 32, False, (27, 1152, 16, 4304)),
    "27B": (5120, 64, 24, 4, 17408, 48, False, (27, 1152, 16, 4304)),
}


def qwen3_5_configs() -> dict:
    """Every dense size, and the language model of the smallest alone."""
    out = {}
    for size, (hidden, layers, heads, kv, inner, value, tied, (depth, width, vision_heads, vision_inner)) in QWEN3_5.items():
        text = dict(
            attention_bias=False, attention_dropout=0.0, attn_output_gate=True, dtype="bfloat16", eos_token_id=248044,
            full_attention_interval=4, head_dim=256, hidden_act="silu", hidden_size=hidden, initializer_range=0.02,
            intermediate_size=inner, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16,
            layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
            linear_num_value_heads=value, linear_value_head_dim=128, mamba_ssm_dtype="float32",
            max_position_embeddings=262144, model_type="qwen3_5_text", mtp_num_hidden_layers=1,
            num_attention_heads=heads, num_hidden_layers=layers, num_key_value_heads=kv, rms_norm_eps=1e-6,
            rope_parameters=dict(
                mrope_interleaved=True, mrope_section=[11, 11, 10], partial_rotary_factor=0.25, rope_theta=10000000,
                rope_type="default",
            ),
            tie_word_embeddings=tied, use_cache=True, vocab_size=248320,
        )
        out[f"qwen3_5_{size}"] = dict(
            architectures=["Qwen3_5ForConditionalGeneration"], image_token_id=248056, model_type="qwen3_5",
            text_config=text, tie_word_embeddings=tied, video_token_id=248057,
            vision_config=dict(
                deepstack_visual_indexes=[], depth=depth, hidden_act="gelu_pytorch_tanh", hidden_size=width,
                in_channels=3, initializer_range=0.02, intermediate_size=vision_inner, model_type="qwen3_5",
                num_heads=vision_heads, num_position_embeddings=2304, out_hidden_size=hidden, patch_size=16,
                spatial_merge_size=2, temporal_patch_size=2,
            ),
            vision_end_token_id=248054, vision_start_token_id=248053,
        )
        if size == "0.8B":
            out["qwen3_5_text_0.8B"] = text | dict(architectures=["Qwen3_5ForCausalLM"])
    return out


def qwen3_5_tensors(directory) -> dict:
    """The last number of a tensor is a list of layers if not every layer has it."""
    config = AutoConfig.from_pretrained(directory)
    of = Qwen3_5ForCausalLM if config.model_type == "qwen3_5_text" else Qwen3_5ForConditionalGeneration
    with torch.device("meta"):
        model = of(config)
    rows, total = {}, 0
    for n, p in model.named_parameters():
        total += p.numel()
        layer = re.search(r"\b(?:layers|blocks)\.(\d+)\.", n)
        pattern = re.sub(r"\b(layers|blocks)\.(\d+)\.", r"\1.{i}.", n)
        rows.setdefault((pattern, tuple(p.shape)), []).append(int(layer[1]) if layer else None)
    assert len({pattern for pattern, _ in rows}) == len(rows)
    each = lambda layers: 0 if layers == [None] else len(layers) if layers == list(range(len(layers))) else layers
    return dict(
        tied=config.tie_word_embeddings, parameters=total,
        tensors=[[p, list(s), each(layers)] for (p, s), layers in rows.items()],
    )


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


# size -> hidden, intermediate, layers, heads, kv heads, vocabulary, tied
QWEN2_5 = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True), "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True), "7B": (3584, 18944, 28, 28, 4, 152064, False),
}
# size -> hidden, intermediate, layers, heads, tied; all have 8 key and value heads of width 128.
QWEN3 = {
    "0.6B": (1024, 3072, 28, 16, True), "1.7B": (2048, 6144, 28, 16, True), "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
}
# size -> hidden, intermediate, layers, heads, kv heads, theta
SMOLLM2 = {
    "135M": (576, 1536, 30, 9, 3, 100000), "360M": (960, 2560, 32, 15, 5, 100000),
    "1.7B": (2048, 8192, 24, 32, 32, 130000),
}


def text_configs() -> dict:
    """Models that read text only. Llama 3's has the sizes of 8B and nothing that the class has by default."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shared = dict(hidden_act="silu", initializer_range=0.02, torch_dtype="bfloat16", use_cache=True)
    out = {}
    for size, (*sizes, kv, vocab, tied) in QWEN2_5.items():
        out[f"qwen2_5_{size}"] = dict(zip(names, sizes)) | shared | dict(
            architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, bos_token_id=151643, eos_token_id=151645,
            max_position_embeddings=32768, max_window_layers=sizes[2], model_type="qwen2", num_key_value_heads=kv,
            rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=32768, tie_word_embeddings=tied,
            use_sliding_window=False, vocab_size=vocab,
        )
    for size, (*sizes, tied) in QWEN3.items():
        out[f"qwen3_{size}"] = dict(zip(names, sizes)) | shared | dict(
            architectures=["Qwen3ForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=151643,
            eos_token_id=151645, head_dim=128, max_position_embeddings=40960, max_window_layers=sizes[2],
            model_type="qwen3", num_key_value_heads=8, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000,
            sliding_window=None, tie_word_embeddings=tied, use_sliding_window=False, vocab_size=151936,
        )
    out["qwen3_30B-A3B"] = out["qwen3_8B"] | mixture(768) | dict(zip(names, (2048, 6144, 48, 32))) | dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_key_value_heads=4,
    )
    for size, (*sizes, kv, theta) in SMOLLM2.items():
        out[f"smollm2_{size}"] = dict(zip(names, sizes)) | shared | dict(
            architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=1,
            eos_token_id=2, max_position_embeddings=8192, mlp_bias=False, model_type="llama", num_key_value_heads=kv,
            pad_token_id=2, pretraining_tp=1, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=theta,
            tie_word_embeddings=True, vocab_size=49152,
        )
    # Width, layers and heads are the class's own.
    own = dict(
        architectures=["LlamaForCausalLM"], intermediate_size=14336, max_position_embeddings=8192, model_type="llama",
        num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=500000.0, torch_dtype="bfloat16", vocab_size=128256,
    )
    usual = LlamaConfig()
    out["llama3_8B"] = own | {name: getattr(usual, name) for name in names if name not in own}
    return out


def text_tensors(directory, of=AutoModelForCausalLM) -> dict:
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = of.from_config(config)
    rows, total = {}, 0
    for name, p in model.named_parameters():
        total += p.numel()
        rows.setdefault((re.sub(r"\blayers\.(\d+)\.", r"layers.{i}.", name), tuple(oriented(name, p).shape)), set()).add(name)
    return dict(
        tied=config.tie_word_embeddings, parameters=total,
        tensors=[[p, list(s), len(names) if "{i}" in p else 0] for (p, s), names in rows.items()],
    )


# size -> text (width, feed-forward, layers, heads, key and value heads), base rotation, tower with 27 layers
SMOLVLM2 = {
    "256M": ((576, 1536, 30, 9, 3), 100000, False), "500M": ((960, 2560, 32, 15, 5), 100000, False),
    "2.2B": ((2048, 8192, 24, 32, 32), 130000, True),
}


def smolvlm_configs() -> dict:
    """As published: what equals the defaults of the classes is left out, `pad_token_id` is outside the vocabulary. The first
    generation has the layout of Idefics3."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    out = {}
    for size, (numbers, theta, large) in (SMOLVLM2 | {"v1_2.2B": (SMOLVLM2["2.2B"][0], 273768, True)}).items():
        first = size.startswith("v1")
        text = dict(
            architectures=["VLlama3ForCausalLM"], head_dim=64, max_position_embeddings=16384 if first else 8192,
            model_type="llama", rms_norm_eps=1e-5, rope_theta=theta, torch_dtype="bfloat16",
            vocab_size=49155 if first else 49280, **({} if first else dict(pad_token_id=2)),
        ) | dict(zip(names, numbers[:3] if large else numbers))
        vision = dict(image_size=384, intermediate_size=4304, num_hidden_layers=27, patch_size=14) if large else \
            dict(hidden_size=768, image_size=512, num_attention_heads=12, patch_size=16)
        own = "idefics3" if first else "smolvlm"
        out[f"smolvlm_{size}"] = dict(
            architectures=["Idefics3ForConditionalGeneration" if first else "SmolVLMForConditionalGeneration"],
            image_token_id=49153 if first else 49190, model_type=own, pad_token_id=2 if first else 128002,
            scale_factor=3 if large else 4, text_config=text, tie_word_embeddings=False, torch_dtype="bfloat16",
            use_cache=True, vision_config=vision | dict(model_type=own if first else "smolvlm_vision"),
        )
    return out


def smolvlm_processor(config) -> dict:
    """preprocessor_config.json, as published."""
    side, longest = (384, 1536) if config["scale_factor"] == 3 else (512, 2048)
    family = "SmolVLM" if config["model_type"] == "smolvlm" else "Idefics3"
    sampling = dict(video_sampling=dict(fps=1, max_frames=64, video_size=dict(longest_edge=side)))
    return dict(
        do_convert_rgb=True, do_image_splitting=True, do_normalize=True, do_pad=True, do_rescale=True, do_resize=True,
        image_mean=[0.5] * 3, image_processor_type=f"{family}ImageProcessor", image_std=[0.5] * 3,
        max_image_size=dict(longest_edge=side), processor_class=f"{family}Processor", resample=1,
        rescale_factor=0.00392156862745098, size=dict(longest_edge=longest),
    ) | (sampling if family == "SmolVLM" else {})


# size -> width, feed-forward, layers, heads, key and value heads, vocabulary
QWEN25_OMNI = {"3B": (2048, 11008, 36, 16, 2, 151936), "7B": (3584, 18944, 28, 28, 4, 152064)}


def omni_configs() -> dict:
    """Qwen2.5-Omni as published, as far as the thinker is concerned; the 7B one with all of its parts. Qwen2-Audio leaves the sizes
    of its language model to the class."""
    out = {}
    for size, (hidden, intermediate, layers, heads, kv_heads, vocab) in QWEN25_OMNI.items():
        rope = dict(rope_scaling={"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}, rope_theta=1000000.0)
        thinker = dict(
            audio_config=dict(
                activation_function="gelu", d_model=1280, encoder_attention_heads=20, encoder_ffn_dim=5120, encoder_layers=32,
                max_source_positions=1500, model_type="qwen2_5_omni_audio_encoder", n_window=100, num_hidden_layers=32,
                num_mel_bins=128, output_dim=hidden, scale_embedding=False,
            ),
            audio_end_token_id=151648, audio_start_token_id=151647, audio_token_index=151646, bos_token_id=151644,
            eos_token_id=151645, image_token_index=151655, initializer_range=0.02, model_type="qwen2_5_omni_thinker",
            pad_token_id=151643, position_id_per_seconds=25, seconds_per_chunk=2,
            text_config=dict(
                hidden_act="silu", hidden_size=hidden, initializer_range=0.02, intermediate_size=intermediate,
                max_position_embeddings=32768, max_window_layers=28, model_type="qwen2_5_omni_text",
                num_attention_heads=heads, num_hidden_layers=layers, num_key_value_heads=kv_heads, rms_norm_eps=1e-6,
                sliding_window=32768, tie_word_embeddings=False, use_cache=True, use_sliding_window=False, vocab_size=vocab,
            ) | rope,
            torch_dtype="bfloat16", user_token_id=872, video_token_index=151656,
            vision_config=dict(
                depth=32, embed_dim=1280, fullatt_block_indexes=[7, 15, 23, 31], hidden_act="silu", hidden_size=1280,
                in_channels=3, in_chans=3, intermediate_size=3420, model_type="qwen2_5_omni_vision_encoder", num_heads=16,
                out_hidden_size=hidden, patch_size=14, spatial_merge_size=2, spatial_patch_size=14, temporal_patch_size=2,
                tie_word_embeddings=True, tokens_per_second=25, window_size=112,
            ),
            vision_end_token_id=151653, vision_start_token_id=151652, vision_token_id=151654,
        )
        out[f"qwen2_5_omni_{size}"] = dict(
            architectures=["Qwen2_5OmniModel"], enable_audio_output=True, enable_talker=True, model_type="qwen2_5_omni",
            thinker_config=thinker, torch_dtype="bfloat16",
        )
        if size == "7B":
            out["qwen2_5_omni_7B"] |= dict(
                talker_config=dict(
                    embedding_size=3584, head_dim=128, hidden_size=896, intermediate_size=18944,
                    model_type="qwen2_5_omni_talker", num_attention_heads=12, num_hidden_layers=24,
                    num_key_value_heads=4, vocab_size=8448,
                ) | rope,
                token2wav_config=dict(
                    bigvgan_config=dict(
                        mel_dim=80, model_type="qwen2_5_omni_bigvgan", resblock_dilation_sizes=[[1, 3, 5]] * 3,
                        resblock_kernel_sizes=[3, 7, 11], upsample_initial_channel=1536,
                        upsample_kernel_sizes=[11, 7, 4, 4, 4, 4], upsample_rates=[5, 3, 2, 2, 2, 2],
                    ),
                    dit_config=dict(
                        emb_dim=512, enc_attention_channels=64, enc_channels=[256, 256, 256, 256, 768],
                        enc_dilations=[1, 2, 3, 4, 1], enc_dim=128, enc_emb_dim=192, enc_kernel_sizes=[5, 3, 3, 3, 1],
                        enc_res2net_scale=2, enc_se_channels=64, head_dim=64, hidden_size=1024, mel_dim=80,
                        model_type="qwen2_5_omni_dit", num_attention_heads=16, num_embeds=8193, num_hidden_layers=22,
                    ),
                    model_type="qwen2_5_omni_token2wav",
                ),
            )
    out["qwen2_audio_7B"] = dict(
        architectures=["Qwen2AudioForConditionalGeneration"], audio_token_index=151646, ignore_index=-100,
        audio_config=dict(
            activation_function="gelu", d_model=1280, encoder_attention_heads=20, encoder_ffn_dim=5120, encoder_layers=32,
            max_source_positions=1500, model_type="qwen2_audio_encoder", num_mel_bins=128, scale_embedding=False,
        ),
        model_type="qwen2_audio", torch_dtype="bfloat16",
        text_config=dict(
            intermediate_size=11008, max_position_embeddings=8192, model_type="qwen2", rms_norm_eps=1e-5, rope_theta=10000,
            torch_dtype="bfloat16", vocab_size=156032,
        ),
    )
    return out


def omni_processor(config) -> dict:
    """preprocessor_config.json, as published."""
    whisper = dict(
        chunk_length=300, feature_extractor_type="WhisperFeatureExtractor", feature_size=128, hop_length=160, n_fft=400,
        padding_side="right", padding_value=0.0, return_attention_mask=True, sampling_rate=16000,
    )
    if config["model_type"] == "qwen2_audio":
        return whisper | dict(chunk_length=30, processor_class="Qwen2AudioProcessor")
    return whisper | dict(
        dither=0.0, image_mean=[0.48145466, 0.4578275, 0.40821073], image_processor_type="Qwen2VLImageProcessor",
        image_std=[0.26862954, 0.26130258, 0.27577711], max_pixels=12845056, merge_size=2, min_pixels=3136, patch_size=14,
        processor_class="Qwen2_5OmniProcessor", temporal_patch_size=2,
    )


def omni_tensors(key, directory) -> dict:
    """As `tensor_list`, without a table that only the talker uses. The tensors of the parts that speak are listed in `speakers.json` of
    the 7B size, as patterns with the number of their names."""
    config = AutoConfig.from_pretrained(directory)
    audio = key.startswith("qwen2_audio")
    whole = key == "qwen2_5_omni_7B"
    with torch.device("meta"):
        if audio:
            model = Qwen2AudioForConditionalGeneration(config)
        elif whole:
            model = Qwen2_5OmniForConditionalGeneration(config)
        else:
            model = Qwen2_5OmniThinkerForConditionalGeneration(config.thinker_config)
    name_of = omni_name("qwen2_audio" if audio else "omni")
    own = model.thinker if whole else model
    shapes = {name_of(n): tuple(p.shape) for n, p in own.named_parameters()}
    assert audio or len(shapes) == {"3B": 1346 + 8 * 12, "7B": 1346}[key[-2:]], len(shapes)
    shapes.pop("thinker.audio_tower.audio_bos_eos_token.weight", None)
    if whole:
        speakers = Counter(re.sub(r"\.\d+\b", ".{i}", n) for n, _ in model.named_parameters() if not n.startswith("thinker."))
        write_json(directory / "speakers.json", dict(speakers))
    rows = {}
    for name, shape in shapes.items():
        rows.setdefault((re.sub(r"\b(layers|blocks)\.(\d+)\.", r"\1.{i}.", name), shape), set()).add(name)
    assert len({pattern for pattern, _ in rows}) == len(rows)
    return dict(
        tied=False, parameters=sum(math.prod(s) for s in shapes.values()),
        tensors=[[p, list(s), len(names) if "{i}" in p else 0] for (p, s), names in rows.items()],
    )


def aria_config() -> dict:
    """As published: width and heads of the tower, and the epsilon of the language model's norms, are left to the classes."""
    return dict(
        architectures=["AriaForConditionalGeneration"], image_token_index=9, model_type="aria",
        projector_patch_to_query_dict={"1225": 128, "4900": 256}, torch_dtype="bfloat16",
        text_config=dict(
            hidden_size=2560, intermediate_size=1664, max_position_embeddings=65536, model_type="aria_text",
            moe_num_experts=64, moe_topk=6, num_attention_heads=20, num_hidden_layers=28, num_key_value_heads=20,
            rope_theta=5000000, torch_dtype="bfloat16", vocab_size=100352,
        ),
        vision_config=dict(
            attention_heads=16, image_size=980, intermediate_size=4304, model_type="idefics3_vision",
            num_hidden_layers=27, patch_size=14, torch_dtype="bfloat16",
        ),
    )


def aria_tensors(directory) -> dict:
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = AriaForConditionalGeneration(config)
    rows, total = {}, 0
    for n, p in model.named_parameters():
        name = aria_name(n)
        total += p.numel()
        rows.setdefault((re.sub(r"\blayers\.(\d+)\.", r"layers.{i}.", name), tuple(p.shape)), set()).add(name)
    assert len({pattern for pattern, _ in rows}) == len(rows)
    return dict(
        tied=False, parameters=total,
        tensors=[[p, list(s), len(names) if "{i}" in p else 0] for (p, s), names in rows.items()],
    )


def main():
    lines = []
    for key, config in (
        configs() | qwen3_vl_configs() | qwen3_5_configs() | internvl_configs() | {"aria_25B": aria_config()} | smolvlm_configs()
        | text_configs() | omni_configs()
    ).items():
        directory = PUBLISHED / key
        write_json(directory / "config.json", config)
        if key.startswith(("qwen2_5_omni", "qwen2_audio")):
            write_json(directory / "preprocessor_config.json", omni_processor(config))
            result = omni_tensors(key, directory)
        elif config["model_type"] in ("qwen2", "qwen3", "qwen3_moe", "llama"):
            result = text_tensors(directory)
        elif key.startswith("qwen3_5"):
            result = qwen3_5_tensors(directory)
        elif key.startswith("smolvlm"):
            write_json(directory / "preprocessor_config.json", smolvlm_processor(config))
            result = text_tensors(directory, AutoModelForImageTextToText)
        elif key.startswith("aria"):
            result = aria_tensors(directory)
        elif key.startswith("qwen3"):
            result = qwen3_vl_tensors(directory)
        elif key.startswith("internvl"):
            size = key.removeprefix("internvl_").removeprefix("hf_")
            result = internvl_tensors(PUBLISHED / f"internvl_hf_{size}", original="_hf_" not in key)
        else:
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
