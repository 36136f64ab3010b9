"""Qwen3.5: checkpoints and cases. The rows and completions are those of Qwen3-VL, whose processor the family shares."""

import json
import math
import shutil
import tempfile
from pathlib import Path

import fixtures
import torch
from fixtures import EOT, ID, IMG, OUT, VE, VID, VOCAB, VS, extend, greedy, save_tensors, sketch, write_json
from make_internvl import three_steps
from make_qwen3_vl import (
    CASES, GREEDY_TOKENS, encode, inputs_of, logits_of, logp_of, pixels_of, positions_of, prepared_rows, render,
    write_sidecars,
)
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

ROOT = OUT / "qwen3_5"
LINEAR, FULL = "linear_attention", "full_attention"
# name -> kinds of the blocks (None for every fourth), key and value heads, their widths, tied, seed
CHECKPOINTS = {
    # The last block has the delta rule.
    "qwen3_5": ([LINEAR, FULL, LINEAR], (2, 4), (8, 12), True, 67),
    "qwen3_5_untied": (None, (2, 2), (16, 16), False, 3),
    # The language model alone, as transformers saves it.
    "qwen3_5_text": ([FULL, LINEAR, LINEAR, FULL, LINEAR], (1, 3), (8, 8), True, 2),
}
RESULTS = {"qwen3_5": "ABCDEF", "qwen3_5_untied": "CE", "qwen3_5_text": "B"}


def text_config(name):
    kinds, (key, value), (key_dim, value_dim), tied, _ = CHECKPOINTS[name]
    return dict(
        attention_bias=False, attention_dropout=0.0, attn_output_gate=True, dtype="float32", eos_token_id=EOT,
        full_attention_interval=4, head_dim=16, hidden_act="silu", hidden_size=48, initializer_range=0.02,
        intermediate_size=80, linear_conv_kernel_dim=4, linear_key_head_dim=key_dim, linear_num_key_heads=key,
        linear_num_value_heads=value, linear_value_head_dim=value_dim, mamba_ssm_dtype="float32",
        max_position_embeddings=512, model_type="qwen3_5_text", num_attention_heads=4,
        num_hidden_layers=len(kinds) if kinds else 4, num_key_value_heads=2, rms_norm_eps=1e-6,
        rope_parameters=dict(
            mrope_interleaved=True, mrope_section=[2, 1, 1], partial_rotary_factor=0.5, rope_theta=10000000,
            rope_type="default",
        ),
        tie_word_embeddings=tied, use_cache=True, vocab_size=VOCAB,
    ) | (dict(layer_types=kinds) if kinds else {})


def hub_config(name):
    """config.json in the form of the hub."""
    if name == "qwen3_5_text":
        return text_config(name) | dict(architectures=["Qwen3_5ForCausalLM"])
    tied = CHECKPOINTS[name][3]
    return dict(
        architectures=["Qwen3_5ForConditionalGeneration"], image_token_id=IMG, model_type="qwen3_5",
        text_config=text_config(name), tie_word_embeddings=tied, transformers_version="4.57.0.dev0",
        video_token_id=VID,
        vision_config=dict(
            deepstack_visual_indexes=[], depth=3, hidden_act="gelu_pytorch_tanh", hidden_size=16, in_channels=3,
            initializer_range=0.02, intermediate_size=24, model_type="qwen3_5", num_heads=2, num_position_embeddings=25,
            out_hidden_size=48, patch_size=16, spatial_merge_size=2, temporal_patch_size=2,
        ),
        vision_end_token_id=VE, vision_start_token_id=VS,
    )


def new_model(name):
    """Random weights with a useful spread: decays of every size, logits that differ by more than rounding."""
    raw = {k: v for k, v in hub_config(name).items() if k not in ("architectures", "model_type", "transformers_version")}
    text = name == "qwen3_5_text"
    config = Qwen3_5TextConfig(**raw) if text else Qwen3_5Config(**raw)
    model = (Qwen3_5ForCausalLM if text else Qwen3_5ForConditionalGeneration)._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    generator = torch.Generator().manual_seed(CHECKPOINTS[name][-1])
    with torch.no_grad():
        for n, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=generator)
            if n.endswith("A_log"):
                p.copy_(2.0 * noise - 2.0)
            elif n.endswith("dt_bias") or n.endswith("bias"):
                p.copy_(0.1 * noise)
            elif p.dim() == 1:
                around_one = "visual" not in n and not n.endswith("linear_attn.norm.weight")
                p.copy_(0.2 * noise if around_one else 1.0 + 0.2 * noise)
            elif "embed_tokens" in n or "lm_head" in n:
                p.copy_(0.35 * noise)
            elif "pos_embed" in n:
                p.copy_(0.5 * noise)
            elif n.endswith("conv1d.weight"):
                p.copy_(0.7 * noise)
            else:
                loud = n.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                gain = (1.2 if "merger" in n else 0.8) if "visual" in n else (2.0 if loud else 1.2)
                p.copy_(noise * (gain / math.sqrt(p[0].numel())))
    return model


def parameters(model):
    return dict(model.named_parameters())


def more_tensors():
    """Weights for speculative decoding, which published files have and transformers ignores."""
    generator = torch.Generator().manual_seed(7)
    return {f"mtp.{n}": torch.randn(*shape, generator=generator) for n, shape in
            {"fc.weight": (48, 96), "layers.0.input_layernorm.weight": (48,), "norm.weight": (48,)}.items()}


def write_checkpoints():
    for name, (_, _, _, tied, _) in CHECKPOINTS.items():
        directory = fixtures.CHECKPOINTS / name
        shutil.rmtree(directory, ignore_errors=True)
        model = new_model(name)
        tensors = {n: p.detach() for n, p in parameters(model).items()}
        assert ("lm_head.weight" in tensors) != tied
        # transformers writes these names.
        with tempfile.TemporaryDirectory() as scratch:
            model.save_pretrained(scratch)
            with safe_open(f"{scratch}/model.safetensors", "pt") as file:
                assert set(file.keys()) == set(tensors), set(file.keys()) ^ set(tensors)
            config = json.loads((Path(scratch) / "config.json").read_text())
        more = more_tensors() if name == "qwen3_5" else {}
        save_tensors(directory / "model.safetensors", tensors | more, format="pt")
        write_json(directory / "config.json", config if name == "qwen3_5_untied" else hub_config(name))
        # Published places of the processor's files.
        write_sidecars(directory, "qwen3_vl")
        if name == "qwen3_5_text":
            (directory / "preprocessor_config.json").unlink()
            (directory / "video_preprocessor_config.json").unlink()
        loaded = type(model).from_pretrained(directory, dtype=torch.float32)
        assert all(torch.equal(p, tensors[n]) for n, p in parameters(loaded).items())


def run_case(model, name, case, inputs):
    text, media, fps, _ = CASES[case]
    prompt, pixels = encode(render(text, media, fps)), inputs_of(media)
    only_text = name == "qwen3_5_text"
    if only_text:
        positions = torch.arange(len(prompt)).expand(3, -1)
        logits = lambda ids: model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    else:
        positions = positions_of(model, prompt, pixels)
        logits = lambda ids: logits_of(model, ids, extend(positions, len(ids) - len(prompt)), pixels)
    out = {"prompt_ids": torch.tensor(prompt), "position_ids": positions}
    if media:
        with torch.no_grad():
            rows = [pixels_of(m) for m in media]
            made = [model.model.visual(r, grid_thw=torch.tensor([grid]), return_dict=True) for r, grid in rows]
            out["features"] = torch.cat([m.pooler_output for m in made])
    model.zero_grad(set_to_none=True)
    completion = inputs["completion_ids"].tolist()
    rows = logits(prompt + completion)[len(prompt) - 1 : -1]
    logp = rows.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
    loss = (inputs["coefficients"] * logp).sum()
    loss.backward()
    out |= dict(logits=rows, logp=logp, loss=loss.reshape(1))
    for n, p in parameters(model).items():
        if p.grad is not None:
            assert torch.isfinite(p.grad).all(), n
            out[f"sketch.{n}"] = sketch(p.grad)
            if case == "C" and name == "qwen3_5" and (".layers.0." in n or ".layers.1.self_attn" in n):
                out[f"grad.{n}"] = p.grad
    tokens, margins = greedy(lambda tokens: logits(prompt + tokens)[-1], GREEDY_TOKENS)
    print(f"{name} {case}: L={len(prompt)} loss={float(loss.detach()):.3f} min margin={min(margins):.4f} {tokens}")
    out["greedy"] = torch.tensor(tokens)
    return out, min(margins) > 1e-3 and not any(EOT <= t <= VID or t > ID["</answer>"] for t in tokens)


def write_cases():
    for name, wanted in RESULTS.items():
        model = new_model(name)
        for case in wanted:
            inputs = load_file(OUT / "qwen3_vl" / f"{case}.safetensors")
            out, decided = run_case(model, name, case, inputs)
            assert decided, (name, case)
            save_tensors(ROOT / f"{case}.{name}.safetensors", out)


def write_replay():
    """Three steps of GRPO by transformers' model and torch's optimizer."""
    logp = lambda model, item, completion, dtype: logp_of(model, item["prompt"], completion, item["pixels"])[1]
    three_steps("qwen3_5_untied", new_model("qwen3_5_untied"), prepared_rows(), logp, lambda n: n)


def main():
    ROOT.mkdir(parents=True, exist_ok=True)
    write_checkpoints()
    write_cases()
    write_replay()


if __name__ == "__main__":
    main()
