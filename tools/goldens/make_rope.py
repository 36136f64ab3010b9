"""Scaled rotary positions: frequencies of every kind that is supported, and log-probabilities under them. Writes rope.json."""

import json

import torch
from fixtures import CHECKPOINTS, OUT, extend, family_of, model_classes, position_ids
from make_cases import build_inputs, logits_of, model_inputs
from safetensors.torch import load_file
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM, Qwen2RotaryEmbedding

SCALINGS = {
    "linear": {"type": "linear", "factor": 2.5},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn_all": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 4, "beta_slow": 0.25,
        "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False,
    },
    "yarn_factor": {"rope_type": "yarn", "factor": 3.0, "attention_factor": 1.4},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 96,
    },
}
# Wide heads, as published, and those of the tiny checkpoints.
SHAPES = [(128, 1e6, 32768), (16, 1e6, 512), (64, 1e4, 4096)]


def frequencies():
    rows = []
    for name, scaling in SCALINGS.items():
        for dim, theta, longest in SHAPES:
            config = Qwen2Config(
                hidden_size=2 * dim, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=longest,
                rope_theta=theta, rope_scaling=dict(scaling),
            )
            rotary = Qwen2RotaryEmbedding(config)
            rows.append(dict(
                kind=name, dim=dim, theta=theta, max_position_embeddings=longest,
                frequencies=rotary.inv_freq.tolist(), attention=float(rotary.attention_scaling),
            ))
    return rows


def completion_logp(logits, prompt, completion):
    at = torch.arange(len(prompt) - 1, len(prompt) + len(completion) - 1)
    return logits.log_softmax(-1)[at].gather(1, torch.tensor(completion)[:, None])[:, 0]


def vision_language(name, scaling, case, inputs):
    """A case with pictures and a video under another scaling."""
    config_class, model_class = model_classes(family_of(name))
    raw = json.loads((CHECKPOINTS / name / "config.json").read_text())
    raw["rope_scaling"] = {**scaling, "mrope_section": [2, 3, 3]}
    config = config_class.from_dict(raw)
    model = model_class.from_pretrained(
        CHECKPOINTS / name, config=config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    prompt, completion = inputs["ids"], inputs["completion"]
    positions = position_ids(prompt, family_of(name), inputs["images"], inputs["videos"], inputs["seconds"])
    with torch.no_grad():
        logits = logits_of(
            model, prompt + completion, extend(positions, len(completion)), model_inputs(inputs, case)
        )
    return completion_logp(logits, prompt, completion)


def language(name, section, prefix, scaling):
    """A Qwen2 out of a checkpoint with plain positions: log-probabilities of a row of ids."""
    raw = json.loads((CHECKPOINTS / name / "config.json").read_text())
    text = dict(raw[section] if section else raw)
    keys = Qwen2Config().to_dict().keys() | {"rope_theta"}
    config = Qwen2Config(**{k: v for k, v in text.items() if k in keys and k != "model_type"} | {"rope_scaling": dict(scaling)})
    model = Qwen2ForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    tensors = load_file(CHECKPOINTS / name / "model.safetensors")
    own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    own = {k: v for k, v in own.items() if k in model.state_dict()}
    missing = model.state_dict().keys() - own.keys()
    assert missing <= {"lm_head.weight"}, missing
    model.load_state_dict(own, strict=False)
    model.tie_weights()
    prompt, completion = list(range(20, 40)), list(range(40, 60))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0]
    return completion_logp(logits, prompt, completion)


def main():
    out = dict(scalings=SCALINGS, frequencies=frequencies(), logp={})
    inputs = build_inputs()["E"]
    for name in ("qwen2_vl_tied", "qwen2_5_vl_tied"):
        unscaled = load_file(OUT / f"cases/E.{name}.safetensors")["logp"].flatten()
        for kind, scaling in SCALINGS.items():
            logp = vision_language(name, scaling, "E", inputs)
            assert ((logp - unscaled).abs().max() < 1e-4) == (kind == "dynamic"), (name, kind)
            out["logp"][f"{name}.{kind}"] = logp.tolist()
    for name, section, prefix in (
        ("internvl_hf", "text_config", "language_model."),
        ("internvl_original", "llm_config", "language_model."),
        ("humanomni", None, ""),
    ):
        for kind, scaling in SCALINGS.items():
            out["logp"][f"{name}.{kind}"] = language(name, section, prefix, scaling).tolist()
    (OUT / "rope.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
