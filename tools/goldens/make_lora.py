"""LoRA adapters made and saved by peft on the tiny checkpoints: files, log-probs, gradients of A, B and whole modules."""

import functools
import shutil

import make_aria
import make_internvl
import make_omni
import make_qwen3_5
import make_qwen3_vl
import make_smolvlm
import torch
from fixtures import OUT, extend, family_of, load_model, position_ids, published, save_tensors, sketch
from make_cases import build_inputs, logits_of, model_inputs
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

LORA = OUT / "lora"
DECODER = r"model\.language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
# name -> (checkpoint, case, LoraConfig)
ADAPTERS = {
    "everywhere": (
        "qwen2_5_vl_tied", "E",
        dict(r=4, lora_alpha=8, target_modules=rf"{DECODER}|model\.visual\.blocks\.\d+\.attn\.(qkv|proj)"),
    ),
    "attention": (
        "qwen2_vl_untied", "E",
        dict(r=3, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "v_proj"], modules_to_save=["merger"]),
    ),
}
# InternVL: the decoder, a tower block and the projector in the words of either layout.
INTERNVL = {
    "tiles_hf": (
        "internvl_hf", "C",
        dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj", "projection_layer", "linear_1"]),
    ),
    "tiles_original": (
        "internvl_original", "C",
        dict(r=3, lora_alpha=6, use_rslora=True, target_modules=["attn.qkv", "o_proj", "up_proj", "mlp1.3"]),
    ),
}

# Attention of the decoder, and a layer that the tower's blocks and all mergers have.
QWEN3_VL = {
    "mergers": ("qwen3_vl", "E", dict(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "linear_fc1"])),
    "experts_alone": (
        "qwen3_vl_moe", "E",
        dict(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"],
             target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    ),
}
# Every linear layer of blocks of both kinds.
QWEN3_5 = {
    "delta": (
        "qwen3_5", "E",
        dict(r=3, lora_alpha=6, target_modules=[
            "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj",
            "gate_proj", "up_proj", "down_proj",
        ]),
    ),
}
# The decoder, blocks of the tower and the connector, by the names of all their linear layers.
SMOLVLM = {
    "connector": (
        "smolvlm", "C",
        dict(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "out_proj", "fc1", "down_proj", "proj"]),
    ),
}
# The decoder, both towers and the projection of sound.
OMNI = {
    "hearing": (
        "omni_thinker", "C",
        dict(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj", "attn.q", "fc1", "audio_tower.proj"]),
    ),
}
# Attention, the shared experts and the fused ones, whose tensors are no modules.
ARIA = {
    "experts": (
        "aria", "C",
        dict(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "shared_experts.down_proj"],
             target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    ),
    "experts_down": ("aria", "C", dict(r=2, lora_alpha=4, target_parameters=["experts.down_proj"])),
}


def short(name: str) -> str:
    """A parameter of the wrapped model -> its name in the model, without the wrapper's words."""
    name = name.removeprefix("base_model.model.").replace(".default", "")
    return name.replace(".modules_to_save", "")


def wrap(model, settings):
    """The adapted model with random A and B, and its trained parameters."""
    dropout = 0.0 if "target_parameters" in settings else 0.1
    wrapped = get_peft_model(model, LoraConfig(lora_dropout=dropout, **settings)).eval()
    generator = torch.Generator().manual_seed(11)
    trained = {n: p for n, p in wrapped.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for n, p in trained.items():
            noise = torch.randn(p.shape, generator=generator)
            if "lora_" in n:
                p.copy_(0.3 * noise / p.shape[1] ** 0.5)
            else:
                p.add_(0.05 * noise)
    return wrapped, trained


def write(adapter, name, wrapped, trained, logp, coefficients, published, layout=lambda _, x: x):
    loss = (coefficients * logp).sum()
    loss.backward()
    out = {"logp": logp, "loss": loss.reshape(1)}
    for n, p in trained.items():
        assert p.grad is not None and torch.isfinite(p.grad).all(), n
        grad = layout(n, p.grad)
        out[f"sketch.{published(short(n))}"] = sketch(grad)
        if "lora_" in n:
            out[f"grad.{published(short(n))}"] = grad
    save_tensors(LORA / f"{adapter}.safetensors", out)
    directory = LORA / adapter
    shutil.rmtree(directory, ignore_errors=True)
    wrapped.peft_config["default"].base_model_name_or_path = name
    wrapped.save_pretrained(directory)
    (directory / "README.md").unlink(missing_ok=True)
    (directory / "adapter_model.safetensors").chmod(0o644)
    print(adapter, float(loss.detach()), len(trained))


def by_expert(experts, n, x):
    """The factors of experts as `[e, k, r]` and `[e, r, n]`."""
    if ".mlp.experts." not in n:
        return x
    if "lora_A" in n:
        return x.reshape(experts, -1, x.shape[1]).transpose(1, 2)
    return x.reshape(x.shape[0], -1, experts).permute(2, 1, 0)


def run(adapter: str, cases):
    name, case, settings = ADAPTERS[adapter]
    inputs = cases[case]
    wrapped, trained = wrap(load_model(name), dict(task_type="CAUSAL_LM", **settings))
    prompt, completion = inputs["ids"], inputs["completion"]
    positions = position_ids(prompt, family_of(name), inputs["images"], inputs["videos"], inputs["seconds"])
    logits = logits_of(wrapped, prompt + completion, extend(positions, len(completion)), model_inputs(inputs, case))
    logp = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
    write(adapter, name, wrapped, trained, logp, inputs["coefficients"], published)


def run_internvl(adapter: str):
    name, case, settings = INTERNVL[adapter]
    inputs = load_file(make_internvl.ROOT / f"{case}.safetensors")
    prompt = load_file(make_internvl.ROOT / f"{case}.{name}.safetensors")["prompt_ids"].tolist()
    # Adapters go into the modules of the model itself.
    model = make_internvl.load(name)
    inner = model.model if isinstance(model, make_internvl.Hf) else model
    wrapped, trained = wrap(inner, settings)
    pixels = make_internvl.normalise(inputs["u8"])
    _, logp = make_internvl.logp_of(model, prompt, inputs["completion_ids"].tolist(), pixels)
    names = make_internvl.Hf.published_name if inner is not model else str
    write(adapter, name, wrapped, trained, logp, inputs["coefficients"], names)


def run_qwen3(adapter: str, adapters, family):
    name, case, settings = adapters[adapter]
    inputs = load_file(make_qwen3_vl.ROOT / f"{case}.safetensors")
    prompt = load_file(family.ROOT / f"{case}.{name}.safetensors")["prompt_ids"].tolist()
    model = family.new_model(name)
    wrapped, trained = wrap(model, settings)
    media = make_qwen3_vl.inputs_of(make_qwen3_vl.CASES[case][1])
    completion = inputs["completion_ids"].tolist()
    positions = extend(make_qwen3_vl.positions_of(model, prompt, media), len(completion))
    # Through the wrapper: adapters of parameters are there only while it runs.
    rows = make_qwen3_vl.logits_of(wrapped, prompt + completion, positions, media)[len(prompt) - 1 : -1]
    logp = rows.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]

    def published(n):
        n = n.replace(".experts.base_layer.lora", ".experts.gate_up_proj.lora")
        return n.replace(".experts.lora", ".experts.down_proj.lora")

    layout = functools.partial(by_expert, make_qwen3_vl.EXPERTS["num_experts"])
    write(adapter, name, wrapped, trained, logp, inputs["coefficients"], published, layout)


def run_smolvlm(adapter: str):
    name, case, settings = SMOLVLM[adapter]
    inputs = load_file(make_smolvlm.ROOT / f"{case}.safetensors")
    own = load_file(make_smolvlm.ROOT / f"{case}.{name}.safetensors")
    model = make_smolvlm.new_model(name)
    wrapped, trained = wrap(model, settings)
    squares = [make_smolvlm.pictures_of(name, medium)[0] for medium in make_smolvlm.CASES[case][1]]
    _, logp = make_smolvlm.logp_of(model, own["prompt_ids"].tolist(), own["completion_ids"].tolist(), squares)
    write(adapter, name, wrapped, trained, logp, inputs["coefficients"], str)


def run_omni(adapter: str):
    name, case, settings = OMNI[adapter]
    inputs = load_file(make_omni.OMNI / f"{case}.safetensors")
    own = load_file(make_omni.OMNI / f"{case}.{name}.safetensors")
    model = make_omni.new_model(name)
    wrapped, trained = wrap(model, settings)
    media = make_omni.inputs_of(name, case)
    _, logp = make_omni.logp_of(model, own["prompt_ids"].tolist(), own["completion_ids"].tolist(), media)
    write(adapter, name, wrapped, trained, logp, inputs["coefficients"], make_omni.published_name(name))


def run_aria(adapter: str):
    name, case, settings = ARIA[adapter]
    inputs = load_file(make_aria.ROOT / f"{case}.safetensors")
    prompt = load_file(make_aria.ROOT / f"{case}.{name}.safetensors")["prompt_ids"].tolist()
    wrapped, trained = wrap(make_aria.new_model(name), settings)
    squares = [make_aria.pictures_of(name, medium) for medium in make_aria.CASES[case][1]]
    # Through the wrapper: adapters of parameters are there only while it runs.
    _, logp = make_aria.logp_of(wrapped, prompt, inputs["completion_ids"].tolist(), squares)
    def published(n):
        n = n.replace(".experts.base_layer.lora", ".experts.fc1.lora").replace(".experts.lora", ".experts.fc2.lora")
        return make_aria.published_name(n)

    layout = functools.partial(by_expert, make_aria.CHECKPOINTS[name][1])
    write(adapter, name, wrapped, trained, logp, inputs["coefficients"], published, layout)


def main():
    cases = build_inputs()
    for adapter in ADAPTERS:
        run(adapter, cases)
    for adapter in INTERNVL:
        run_internvl(adapter)
    for adapter in SMOLVLM:
        run_smolvlm(adapter)
    for adapter in OMNI:
        run_omni(adapter)
    for adapter in ARIA:
        run_aria(adapter)
    for adapter in QWEN3_VL:
        run_qwen3(adapter, QWEN3_VL, make_qwen3_vl)
    for adapter in QWEN3_5:
        run_qwen3(adapter, QWEN3_5, make_qwen3_5)


if __name__ == "__main__":
    main()
