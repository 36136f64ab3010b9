"""Tiny encoders in the hub's layout, and what transformers makes of fixed inputs: outputs, and every gradient of those
that serve as towers. Written to crates/models/tests/golden/encoders.
"""

import math

import torch
from fixtures import OUT, save_tensors, sketch, write_json
from transformers import (
    BertConfig, BertForPreTraining, CLIPConfig, CLIPModel, DistilBertConfig, DistilBertModel, RobertaConfig,
    RobertaForMaskedLM, SiglipConfig, SiglipModel, WhisperConfig, WhisperForConditionalGeneration, XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

ENCODERS = OUT / "encoders"
SIZES = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2)
# Texts of lengths 7, 1 and 4 with start and end tokens.
TEXTS = [[2, 9, 31, 9, 17, 5, 3], [2], [2, 38, 11, 3]]


def randomise(model, seed):
    """No bias is 0, no norm weight is 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for n, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if n.endswith("bias"):
                p.copy_(0.1 * noise)
            elif p.dim() < 2:
                p.copy_((1.0 if "norm" in n.lower() else 0.0) + 0.2 * noise)
            elif "embed" in n and "patch" not in n:
                p.copy_(0.5 * noise)
            else:
                p.copy_(noise * (1.2 / math.sqrt(p[0].numel())))
    for p in model.parameters():
        p.requires_grad_(True)
    return model.eval()


def noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def write(name, config, weights, results):
    save_tensors(ENCODERS / name / "model.safetensors", weights, format="pt")
    write_json(ENCODERS / name / "config.json", config)
    save_tensors(ENCODERS / f"{name}.safetensors", results)


def named_gradients(module):
    """`sketch.<name below the module>` of every gradient; what nothing used has none."""
    return {f"sketch.{n}": sketch(p.grad) for n, p in module.named_parameters() if p.grad is not None}


def eager(cls, config, seed):
    return randomise(cls._from_config(config, attn_implementation="eager", dtype=torch.float32), seed)


def siglip():
    vision = dict(SIZES, num_hidden_layers=3, image_size=20, patch_size=6, num_channels=3)
    # Keys that the hub's file omits have the class's default.
    config = {"model_type": "siglip", "vision_config": vision, "text_config": {"model_type": "siglip_text_model"}}
    text = dict(SIZES, num_hidden_layers=1, vocab_size=20, max_position_embeddings=8, bos_token_id=1, eos_token_id=2)
    model = eager(SiglipModel, SiglipConfig(vision_config=vision, text_config=text), 1)
    tower = model.vision_model
    pixels = noise(2, 2, 3, 20, 20)
    out = tower(pixels, output_hidden_states=True)
    second, last = out.hidden_states[-2], out.last_hidden_state
    c2, c1 = noise(3, *second.shape), noise(4, *last.shape)
    ((c2 * second).sum() + (c1 * last).sum()).backward()
    results = {
        "pixels": pixels, "hidden-2": second, "last": last, "coefficients-2": c2, "coefficients": c1,
        **named_gradients(tower),
    }
    write("siglip", config, {n: p for n, p in model.state_dict().items()}, results)


def whisper():
    config = dict(
        model_type="whisper", d_model=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=24,
        num_mel_bins=6, max_source_positions=10, activation_function="gelu", decoder_layers=1,
        decoder_attention_heads=2, decoder_ffn_dim=16, max_target_positions=4, vocab_size=20, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )
    model = eager(WhisperForConditionalGeneration, WhisperConfig(**config), 5)
    encoder = model.model.encoder
    mel = noise(6, 1, 6, 20)
    last = encoder(mel).last_hidden_state
    c = noise(7, *last.shape)
    (c * last).sum().backward()
    weights = {n: p for n, p in model.state_dict().items() if n != "proj_out.weight"}
    results = {"mel": mel, "last": last, "coefficients": c, **named_gradients(encoder)}
    write("whisper", config, weights, results)


def padded(pad):
    longest = max(map(len, TEXTS))
    ids = torch.tensor([t + [pad] * (longest - len(t)) for t in TEXTS])
    mask = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in TEXTS])
    return ids, mask


def packed(hidden, mask):
    return hidden[mask.bool()]


def text_results(out, mask):
    results = {"ids": torch.tensor(sum(TEXTS, [])), "lengths": torch.tensor([len(t) for t in TEXTS])}
    for i, hidden in enumerate(out.hidden_states):
        results[f"hidden.{i}"] = packed(hidden, mask)
    return results


def bert():
    config = dict(
        SIZES, model_type="bert", num_hidden_layers=2, vocab_size=40, max_position_embeddings=16, hidden_act="gelu",
        type_vocab_size=2, layer_norm_eps=1e-12, pad_token_id=0,
    )
    model = eager(BertForPreTraining, BertConfig(**config), 8)
    ids, mask = padded(0)
    out = model.bert(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    c, first = noise(9, len(TEXTS), 16), noise(10, len(TEXTS), 16)
    ((c * out.pooler_output).sum() + (first * out.last_hidden_state[:, 0]).sum()).backward()
    results = {
        **text_results(out, mask), "pooled": out.pooler_output, "coefficients": c, "coefficients.first": first,
        **named_gradients(model.bert),
    }
    # The old names of norms, as in the hub's bert-base-uncased.
    weights = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): p
        for n, p in model.state_dict().items()
        if n != "cls.predictions.decoder.weight"
    }
    write("bert", config, weights, results)


def roberta(name, config_class, model_class, **more):
    config = dict(
        SIZES, model_type=name, num_hidden_layers=3, vocab_size=40, max_position_embeddings=12, hidden_act="gelu",
        type_vocab_size=1, layer_norm_eps=1e-5, pad_token_id=1, bos_token_id=0, eos_token_id=2, **more,
    )
    model = eager(model_class, config_class(**config), 11)
    ids, mask = padded(1)
    with torch.no_grad():
        out = model.roberta(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    weights = {n: p for n, p in model.state_dict().items() if not n.startswith("lm_head.decoder.")}
    write(name, config, weights, text_results(out, mask))


def distilbert():
    config = dict(
        model_type="distilbert", dim=16, hidden_dim=24, n_layers=2, n_heads=2, vocab_size=40,
        max_position_embeddings=16, activation="gelu", pad_token_id=0,
    )
    model = eager(DistilBertModel, DistilBertConfig(**config), 12)
    ids, mask = padded(0)
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    write("distilbert", config, model.state_dict(), text_results(out, mask))


def clip(name, eos):
    vision = dict(SIZES, num_hidden_layers=2, image_size=16, patch_size=4)
    text = dict(
        hidden_size=12, intermediate_size=20, num_attention_heads=3, num_hidden_layers=2, vocab_size=40,
        max_position_embeddings=8, eos_token_id=eos, bos_token_id=38,
    )
    config = dict(model_type="clip", projection_dim=10, vision_config=vision, text_config=text)
    model = eager(CLIPModel, CLIPConfig(vision_config=vision, text_config=text, projection_dim=10), 13)
    pixels = noise(14, 2, 3, 16, 16)
    # The end token is the largest id; padding repeats it, as CLIP's tokenizer does.
    texts = [[38, 4, 21, 7, 39], [38, 39], [38, 5, 39]]
    ids = torch.tensor([t + [39] * (5 - len(t)) for t in texts])
    with torch.no_grad():
        out = model(input_ids=ids, pixel_values=pixels)
        text_features = model.get_text_features(input_ids=ids).pooler_output
        picture_features = model.get_image_features(pixel_values=pixels).pooler_output
    similarity = torch.nn.functional.normalize(text_features) @ torch.nn.functional.normalize(picture_features).T
    assert torch.allclose(similarity * model.logit_scale.exp(), out.logits_per_text, atol=1e-5)
    results = {
        "pixels": pixels, "ids": torch.tensor(sum(texts, [])), "lengths": torch.tensor([len(t) for t in texts]),
        "text": text_features, "pictures": picture_features,
    }
    write(name, config, model.state_dict(), results)


def main():
    siglip()
    whisper()
    bert()
    roberta("roberta", RobertaConfig, RobertaForMaskedLM)
    roberta("xlm-roberta", XLMRobertaConfig, XLMRobertaForMaskedLM)
    distilbert()
    clip("clip", 2)
    clip("clip_eos", 39)


if __name__ == "__main__":
    main()
