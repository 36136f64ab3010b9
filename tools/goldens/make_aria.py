"""Aria: checkpoints, cases, three AdamW steps, positions of patches, pictures. The rows of the cases are read by the tests as
they stand, so prompts and pixels are compared from the file on.

Squares are 56 and 112 px here, which transformers' processor refuses: it takes 490 and 980 alone. Its source is run with other
numbers.
"""

import inspect
import json
import math
import re
import shutil
import tempfile

import fixtures
import numpy as np
import torch
from fixtures import FRAMES, MEDIA, OUT, greedy, is_loud, open_rgb, randomise, row_of, save_tensors, sketch, write_json
from internvl import NUM_MERGES, VOCAB
from make_checkpoints import CORPUS, byte_level_bpe
from make_internvl import number, three_steps
from make_replay import ROWS
from transformers import AriaConfig, AriaForConditionalGeneration, AriaProcessor, PreTrainedTokenizerFast
from transformers.models.aria import image_processing_pil_aria as published

ROOT = OUT / "aria"
GREEDY_TOKENS = 12
# The end of a turn is ordinary text, as in the published vocabulary.
SPECIAL = ["<|endoftext|>", "<|img|>", "<fim_prefix>", "<fim_suffix>"]
ADDED = ["<think>", "</think>", "<answer>", "</answer>"]
ID = {t: 256 + NUM_MERGES + i for i, t in enumerate(SPECIAL + ADDED)}
IMAGE = ID["<|img|>"]
SMALL, LARGE, LEAST, PATCH = 56, 112, 38, 14
QUERIES = {SMALL: 4, LARGE: 8}
HIDDEN, LAYERS, HEADS, EXPERT = 32, 2, 2, 12
WIDTH, DEPTH, TOWER_HEADS, TOWER_INTER = 32, 2, 2, 48
# name -> key and value heads, experts, experts of a row, side of images, whether they are split, seed
CHECKPOINTS = {
    # Seeds: every greedy step of every case is decided clearly, and some expert gets no token.
    "aria": (1, 8, 3, LARGE, False, 8),
    "aria_own": (2, 12, 2, SMALL, True, 3),
}
TEMPLATE = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}<|im_end|>\n{% elif message['content'] is iterable %}{% for content in message['content'] %}"
    "{% if content['type'] == 'text' %}{{ content['text'] }}{% elif content['type'] == 'image' %}"
    "<fim_prefix><|img|><fim_suffix>{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CASES = {
    "A": ("Image-1: <image>\nImage-2: <image>\nAre they equal?", ["noise.png", "shapes.png"]),
    "B": ("How many shapes are there? Think, then answer 42, naïve café.\n", []),
    "C": ("<image>\nWhat is shown in the image?", ["shapes.png"]),
    "D": ("<video>\nWhich way does the ball move?", [FRAMES[:4]]),
    "E": ("First <image>\nthen <video>\nand <image>: which is red?", ["alpha.png", FRAMES[:2], "shapes.png"]),
    # Without a placeholder media come first.
    "F": ("What is shown in the image?", ["noise.png"]),
}
RESULTS = {"aria": "ABCDEF", "aria_own": "CEF"}


def own_config(name):
    """config.json in the form of the hub: what it leaves out there is left out here, as far as sizes allow."""
    kv, experts, topk, _, _, _ = CHECKPOINTS[name]
    text = dict(
        hidden_size=HIDDEN, intermediate_size=EXPERT, max_position_embeddings=512, model_type="aria_text",
        moe_num_experts=experts, moe_topk=topk, num_attention_heads=HEADS, num_hidden_layers=LAYERS,
        num_key_value_heads=kv, rope_theta=5000000, torch_dtype="float32", vocab_size=VOCAB,
    )
    vision = dict(
        attention_heads=16, hidden_size=WIDTH, image_size=LARGE, intermediate_size=TOWER_INTER,
        model_type="idefics3_vision", num_attention_heads=TOWER_HEADS, num_hidden_layers=DEPTH, patch_size=PATCH,
        torch_dtype="float32",
    )
    config = dict(
        architectures=["AriaForConditionalGeneration"], image_token_index=IMAGE, model_type="aria",
        projector_patch_to_query_dict={str((side // PATCH) ** 2): n for side, n in QUERIES.items()}, text_config=text,
        torch_dtype="float32", vision_config=vision,
    )
    if name == "aria_own":
        # The names of the model's own code: other class names, another key for an expert's width.
        text |= dict(intermediate_size=1000, moe_intermediate_size=EXPERT, model_type="aria_moe_lm",
                     moe_num_shared_experts=2, moe_z_loss_coeff=1e-5, moe_aux_loss_coeff=1e-3)
        vision |= dict(model_type="aria_vision_model")
        config |= dict(auto_map={"AutoConfig": "configuration_aria.AriaConfig"})
    return config


def hf_config(name):
    """The same for transformers' classes."""
    config = own_config(name)
    config.pop("auto_map", None)
    config["text_config"] |= dict(model_type="aria_text", intermediate_size=EXPERT)
    config["vision_config"] |= dict(model_type="idefics3_vision")
    config["text_config"].pop("moe_intermediate_size", None)
    return AriaConfig(**{k: v for k, v in config.items() if k not in ("architectures", "model_type", "torch_dtype")})


def published_name(n):
    """In-memory name of transformers 5 -> name in published files."""
    n = n.replace(".experts.gate_up_proj", ".experts.fc1.weight").replace(".experts.down_proj", ".experts.fc2.weight")
    if n == "lm_head.weight":
        return "language_model.lm_head.weight"
    return n.removeprefix("model.").replace("language_model.", "language_model.model.", 1)


def own_name(n):
    """Published name -> name in the model's own code, None for what that does not have."""
    if "post_layernorm" in n:
        return None
    return (
        n.replace("vision_tower.", "vision_tower.vision_model.")
        .replace("multi_modal_projector.layer_norm.", "multi_modal_projector.ln_ffn.")
        .replace("multi_modal_projector.feed_forward.", "multi_modal_projector.ffn.")
        .replace("cross_attn.layer_norm_kv.", "cross_attn.ln_kv.")
    )


def parameters(model):
    return {published_name(n): p for n, p in model.named_parameters()}


def scale(n, p):
    if "position_embedding" in n or n.endswith("query"):
        return 0.7
    if p.dim() == 3:
        return (2.5 if "fc2" in n else 1.2) / math.sqrt(p.shape[1])
    gain = (1.3 if "projector" in n else 0.9) if "language" not in n else (2.0 if is_loud(n) else 1.2)
    return gain / math.sqrt(p[0].numel())


def new_model(name):
    """Random weights with a useful spread: no bias is 0, no norm weight is 1, queries differ."""
    model = AriaForConditionalGeneration._from_config(
        hf_config(name), attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()
    randomise(sorted(parameters(model).items()), CHECKPOINTS[name][-1], scale)
    return model


def build_tokenizer():
    tokenizer = byte_level_bpe(CORPUS, NUM_MERGES, SPECIAL, ADDED)
    assert all(tokenizer.token_to_id(t) == i for t, i in ID.items())
    assert len(tokenizer.encode("<|im_end|>", add_special_tokens=False).ids) > 1
    return tokenizer


def small_processor():
    """transformers' image processor for squares of 56 and 112 px."""
    source = inspect.getsource(published.AriaImageProcessorPil).replace("[490, 980]", f"[{SMALL}, {LARGE}]")
    source = source.replace("[el[0] * 490, el[1] * 490]", f"[el[0] * {SMALL}, el[1] * {SMALL}]")
    scope = dict(vars(published))
    exec(source.replace("@auto_docstring\n", ""), scope)  # noqa: S102
    return scope["AriaImageProcessorPil"]


def picture_settings(name):
    _, _, _, side, split, _ = CHECKPOINTS[name]
    return dict(max_image_size=side, min_image_size=LEAST, split_image=split)


def pictures_of(name, medium, video_side=SMALL):
    """(squares [n, 3, side, side], masks [n, side, side]) of an image, or of the frames of a video."""
    processor = small_processor()
    if isinstance(medium, list):
        out = processor(max_image_size=video_side, min_image_size=LEAST)(
            images=[open_rgb(MEDIA / p) for p in medium], return_tensors="pt")
    else:
        out = processor(**picture_settings(name))(images=[open_rgb(MEDIA / medium)], return_tensors="pt")
    return out["pixel_values"].float(), out["pixel_mask"]


def write_sidecars(directory, name):
    build_tokenizer().save(str(directory / "tokenizer.json"), pretty=False)
    added = {
        str(i): dict(content=t, lstrip=False, normalized=False, rstrip=False, single_word=False, special=t in SPECIAL)
        for t, i in ID.items()
    }
    write_json(directory / "tokenizer_config.json", dict(
        added_tokens_decoder=added, bos_token=None, clean_up_tokenization_spaces=False, eos_token="<|endoftext|>",
        image_token="<|img|>", model_max_length=512, pad_token="<|endoftext|>",
        tokenizer_class="PreTrainedTokenizerFast", unk_token=None,
    ))
    if name == "aria":
        write_json(directory / "chat_template.json", dict(chat_template=TEMPLATE))
    split = [[r * SMALL, c * SMALL] for r, c in (
        (1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7), (1, 8), (2, 4), (2, 3), (2, 2), (2, 1), (3, 1), (3, 2), (4, 1),
        (4, 2), (5, 1), (6, 1), (7, 1), (8, 1),
    )]
    write_json(directory / "preprocessor_config.json", picture_settings(name) | dict(
        do_convert_rgb=True, do_normalize=True, do_rescale=True, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        image_processor_type="AriaImageProcessor", processor_class="AriaProcessor", resample=3,
        rescale_factor=0.00392156862745098, split_resolutions=split,
    ))
    write_json(directory / "processor_config.json", dict(
        processor_class="AriaProcessor", size_conversion={str(side): n for side, n in QUERIES.items()},
    ))
    write_json(directory / "generation_config.json", dict(
        bos_token_id=1, eos_token_id=ID["<|endoftext|>"], pad_token_id=ID["<|endoftext|>"], temperature=0.9,
    ))


def write_checkpoints():
    for name in CHECKPOINTS:
        directory = fixtures.CHECKPOINTS / name
        shutil.rmtree(directory, ignore_errors=True)
        model = new_model(name)
        tensors = {n: p.detach() for n, p in parameters(model).items()}
        # transformers writes these names.
        with tempfile.TemporaryDirectory() as scratch:
            model.save_pretrained(scratch)
            loaded = AriaForConditionalGeneration.from_pretrained(scratch, dtype=torch.float32)
            from safetensors import safe_open
            with safe_open(f"{scratch}/model.safetensors", "pt") as file:
                assert set(file.keys()) == set(tensors), set(file.keys()) ^ set(tensors)
            assert all(torch.equal(p, tensors[n]) for n, p in parameters(loaded).items())
        if name == "aria_own":
            tensors = {own_name(n): p for n, p in tensors.items() if own_name(n)}
        save_tensors(directory / "model.safetensors", tensors, format="pt")
        write_json(directory / "config.json", own_config(name))
        write_sidecars(directory, name)


def render(name, text, media, video_side=SMALL):
    """The prompt as a string, media expanded."""
    spell = []
    for medium in media:
        pictures, _ = pictures_of(name, medium, video_side)
        tokens = "<|img|>" * QUERIES[pictures.shape[-1]]
        if isinstance(medium, list):
            spell.append("".join(f"<fim_prefix>{tokens}<fim_suffix>" for _ in medium))
        else:
            spell.append("<fim_prefix>" + tokens * len(pictures) + "<fim_suffix>")
    pieces = re.split(r"(<image>|<video>)", text)
    if media and len(pieces) == 1:
        pieces = ["<video>" if isinstance(m, list) else "<image>" for m in media] + [text]
    parts = [spelled if p in ("<image>", "<video>") else p for p, spelled in number(pieces, spell)]
    return "<|im_start|>user\n" + "".join(parts) + "<|im_end|>\n<|im_start|>assistant\n"


def features(model, media):
    parts = [
        model.get_image_features(pixels.to(model.dtype), pixel_mask=mask).pooler_output.flatten(0, 1)
        for pixels, mask in media
    ]
    return torch.cat(parts) if parts else None


def logits_of(model, ids, media):
    ids = torch.tensor([ids])
    x = model.get_input_embeddings()(ids)
    own = features(model, media)
    if own is not None:
        here = (ids == IMAGE)[..., None]
        assert int(here.sum()) == len(own)
        x = x.masked_scatter(here, own)
    out = model(
        inputs_embeds=x, attention_mask=torch.ones_like(ids), position_ids=torch.arange(ids.shape[1])[None],
        use_cache=False, output_router_logits=True,
    )
    return out.logits[0]


def logp_of(model, prompt, completion, media):
    rows = logits_of(model, prompt + completion, media)[len(prompt) - 1 : -1]
    return rows, rows.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def idle_experts(model):
    """Experts of the first layer that got no token: their gradient is zero."""
    grad = parameters(model)["language_model.model.layers.0.mlp.experts.fc1.weight"].grad
    return [e for e in range(len(grad)) if not grad[e].any()]


def run_case(model, name, case, inputs):
    text, media = CASES[case]
    prompt = build_tokenizer().encode(render(name, text, media), add_special_tokens=False).ids
    squares = [pictures_of(name, medium) for medium in media]
    out = {"prompt_ids": torch.tensor(prompt)}
    if squares:
        with torch.no_grad():
            out["features"] = features(model, squares)
        # Pictures themselves are compared by sketches: colours and masks of all squares.
        out["pixels"] = torch.stack([sketch(pixels) for pixels, _ in squares])
        out["masks"] = torch.stack([sketch(mask.float()) for _, mask in squares])
    model.zero_grad(set_to_none=True)
    rows, logp = logp_of(model, prompt, inputs["completion"], squares)
    loss = (inputs["coefficients"] * logp).sum()
    loss.backward()
    out |= dict(logits=rows, logp=logp, loss=loss.reshape(1))
    for n, p in parameters(model).items():
        if p.grad is not None:
            assert torch.isfinite(p.grad).all(), n
            out[f"sketch.{n}"] = sketch(p.grad)
            if case == "C" and name == "aria" and (".layers.1.mlp." in n and "shared" not in n):
                out[f"grad.{n}"] = p.grad
    idle = idle_experts(model)
    out["idle"] = torch.tensor(idle, dtype=torch.int64)
    tokens, margins = greedy(lambda tokens: logits_of(model, prompt + tokens, squares)[-1], GREEDY_TOKENS, IMAGE)
    print(f"{name} {case}: L={len(prompt)} loss={float(loss.detach()):.3f} min margin={min(margins):.4f} idle={idle} {tokens}")
    out["greedy"] = torch.tensor(tokens)
    return out, min(margins) > 1e-3 and not set(tokens) & set(ID[t] for t in SPECIAL)


def write_cases():
    generator = torch.Generator().manual_seed(23)
    lines, cases = [], {}
    for case, (text, media) in CASES.items():
        lines.append(row_of(case, text, media))
        completion = torch.randint(0, 256, (8,), generator=generator).tolist()
        completion[5] = ID["<answer>"]
        cases[case] = dict(completion=completion, coefficients=torch.randn(8, generator=generator))
        save_tensors(ROOT / f"{case}.safetensors", dict(
            completion_ids=torch.tensor(completion), coefficients=cases[case]["coefficients"]
        ))
    (ROOT / "rows.jsonl").write_text("\n".join(lines) + "\n")
    for name, wanted in RESULTS.items():
        model, idle = new_model(name), 0
        for case in wanted:
            out, decided = run_case(model, name, case, cases[case])
            assert decided, (name, case)
            idle += out["idle"].numel()
            save_tensors(ROOT / f"{case}.{name}.safetensors", out)
        assert idle > 0, name


def check_processor():
    """Ids, pixels and masks of images are what transformers' own processor makes."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(), eos_token="<|endoftext|>", pad_token="<|endoftext|>",
        extra_special_tokens=dict(image_token="<|img|>"),
    )
    for name in CHECKPOINTS:
        processor = AriaProcessor(
            small_processor()(**picture_settings(name)), tokenizer, TEMPLATE, size_conversion=QUERIES
        )
        for case in "CF" if name == "aria" else "F":
            text, media = CASES[case]
            content = [
                {"type": "image"} if p == "<image>" else {"type": "text", "text": p}
                for p in re.split(r"(<image>)", text) if p
            ]
            if case == "F":
                content = [{"type": "image"}] + content
            prompt = processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
            pictures = [open_rgb(MEDIA / m) for m in media]
            out = processor(text=[prompt], images=pictures, images_kwargs=picture_settings(name), return_tensors="pt")
            ids = build_tokenizer().encode(render(name, text, media), add_special_tokens=False).ids
            assert out["input_ids"][0].tolist() == ids, (name, case)
            pixels, masks = pictures_of(name, media[0])
            assert torch.equal(out["pixel_values"].float(), pixels) and torch.equal(out["pixel_mask"], masks)


def write_pictures():
    """Squares of the published sizes, by sketch: [file, side, split, number of squares, of pixels, of masks]."""
    rows = []
    for file in ("shapes.png", "noise.png"):
        for side, split in ((490, False), (980, False), (490, True), (980, True)):
            out = published.AriaImageProcessorPil(max_image_size=side, split_image=split)(
                images=[open_rgb(MEDIA / file)], return_tensors="pt"
            )
            pixels, masks = out["pixel_values"].float(), out["pixel_mask"].float()
            sizes = [[int(m[:, 0].sum()), int(m[0].sum())] for m in masks]
            rows.append([file, side, split, sizes, sketch(pixels).tolist()])
            print(file, side, split, sizes)
    # How many squares sizes are split to.
    generator = np.random.default_rng(3)
    counts = []
    for k in range(120):
        w, h = (int(x) for x in generator.integers(1, 3000, 2))
        h = w if k % 7 == 0 else h
        side = (490, 980)[k % 2]
        n = published.AriaImageProcessorPil(max_image_size=side).get_number_of_image_patches(
            h, w, dict(split_image=True, max_image_size=side)
        )
        counts.append([w, h, side, n])
    write_json(ROOT / "pictures.json", dict(pictures=rows, counts=counts))


def write_buckets():
    """Place of each of `count` patches along 70 positions, for every count: the tower's own code."""
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionConfig, Idefics3VisionEmbeddings

    config = Idefics3VisionConfig(hidden_size=2, image_size=980, patch_size=14)
    embeddings = Idefics3VisionEmbeddings(config)
    with torch.no_grad():
        embeddings.patch_embedding.weight.zero_()
        embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight.copy_(torch.arange(4900.0)[:, None].repeat(1, 2))
    rows = []
    for count in range(1, 71):
        mask = torch.zeros(1, 70, 70, dtype=torch.bool)
        mask[:, :count, :] = True
        ids = embeddings(torch.zeros(1, 3, 980, 980), mask)[0, :, 0].view(70, 70)
        rows.append([int(i) // 70 for i in ids[:count, 0]])
    text = ",\n".join(json.dumps(r, separators=(",", ":")) for r in rows)
    (ROOT / "buckets.json").write_text(f"[\n{text}\n]\n")


def write_replay():
    """Three steps of GRPO by transformers' model and torch's optimizer."""
    name = "aria"
    encode = lambda s: build_tokenizer().encode(s, add_special_tokens=False).ids
    prepared = []
    for row in ROWS:
        media = ["shapes.png"] if "image" in row["media"] else [FRAMES] if "video" in row["media"] else []
        rewards = torch.tensor(row["rewards"], dtype=torch.float64)
        prepared.append(dict(
            row=row["id"], prompt=encode(render(name, row["question"], media, LARGE)),
            # The row's own limit lets the video have the larger squares.
            pixels=[pictures_of(name, m, LARGE) for m in media], completions=[encode(c) for c in row["completions"]],
            advantages=((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist(),
        ))
    logp = lambda model, item, completion, dtype: logp_of(model, item["prompt"], completion, item["pixels"])[1]
    three_steps(name, new_model(name), prepared, logp, published_name)


def main():
    ROOT.mkdir(parents=True, exist_ok=True)
    write_checkpoints()
    check_processor()
    write_buckets()
    write_pictures()
    write_cases()
    write_replay()


if __name__ == "__main__":
    main()
