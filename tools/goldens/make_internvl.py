"""InternVL in both layouts: checkpoints, cases, three AdamW steps, tilings. The rows of the cases are read by the tests as they
stand, so prompts and pixels are compared from the file on."""

import copy
import json
import re
import shutil

import fixtures
import torch
from fixtures import FRAMES, MEDIA, OUT, greedy, open_rgb, oriented, row_of, save_tensors, sketch, write_json
from internvl import (
    ADDED, CHECKPOINTS, CONTEXT, DEPTH, EOT, EXPERTS, EXPERT_INTER, HEADS, HIDDEN, ID, IM_END, INTER, KV_HEADS, LAYERS, MAX_TILES, MEAN,
    NUM_MERGES, PATCH, SIDE, SPECIAL, STD, TEMPLATES, TOKENS_PER_TILE, TOPK, TOWER_HEADS, TOWER_INTER, VOCAB, WIDTH, Original,
    WIDE_HEAD, arrangement, fused, hf_names, new_original, normalise, tiles_u8, to_hf,
)
from make_checkpoints import CORPUS, byte_level_bpe
from make_replay import HYPER, ROWS, grpo_terms
from tokenizers import AddedToken
from transformers import AutoProcessor, InternVLConfig, InternVLForConditionalGeneration, Trainer
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil, get_optimal_tiled_canvas,
)

ROOT = OUT / "internvl"
GREEDY_TOKENS = 12
HF_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<IMG_CONTEXT>\\n' }}{% elif part['type'] == 'video' %}{{ '<video>\\n' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# case -> text with placeholders in the order of the media; media
CASES = {
    "A": ("Image-1: <image>\nImage-2: <image>\nAre they equal?", ["noise.png", "shapes.png"]),
    "B": ("How many shapes are there? Think, then answer 42, naïve café.\n", []),
    "C": ("<image>\nWhat is shown in the image?", ["shapes.png"]),
    "D": ("<video>\nWhich way does the ball move?", [FRAMES[:4]]),
    "E": ("First <image>\nthen <video>\nand <image>: which is red?", ["alpha.png", FRAMES[:2], "shapes.png"]),
    # Without a placeholder media come first.
    "F": ("What is shown in the image?", ["noise.png"]),
}
# Which checkpoints have results for which cases.
RESULTS = {
    "internvl_hf": "ABCDEF", "internvl_original": "ABCDEF", "internvl_rms_hf": "CE", "internvl_rms_original": "CE",
    "internvl3_5_hf": "ABCDE", "internvl3_5_original": "CE", "internvl3_5_moe_hf": "BCE", "internvl3_5_moe_original": "CE",
}


def text_config(tied, qwen3):
    if qwen3 == "moe":
        return text_config(tied, True) | dict(
            architectures=["Qwen3MoeForCausalLM"], decoder_sparse_step=1, mlp_only_layers=[], model_type="qwen3_moe",
            moe_intermediate_size=EXPERT_INTER, norm_topk_prob=True, num_experts=EXPERTS, num_experts_per_tok=TOPK,
            output_router_logits=False, router_aux_loss_coef=0.001,
        )
    if qwen3:
        return dict(
            architectures=["Qwen3ForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=EOT,
            eos_token_id=IM_END, head_dim=WIDE_HEAD, hidden_act="silu", hidden_size=HIDDEN, initializer_range=0.02,
            intermediate_size=INTER, max_position_embeddings=512, max_window_layers=LAYERS, model_type="qwen3",
            num_attention_heads=HEADS, num_hidden_layers=LAYERS, num_key_value_heads=KV_HEADS, rms_norm_eps=1e-6,
            rope_scaling=None, rope_theta=1000000.0, sliding_window=None, torch_dtype="float32", use_cache=True,
            use_sliding_window=False, vocab_size=VOCAB, tie_word_embeddings=tied,
        )
    return dict(
        architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, bos_token_id=EOT, eos_token_id=IM_END,
        hidden_act="silu", hidden_size=HIDDEN, initializer_range=0.02, intermediate_size=INTER,
        max_position_embeddings=512, max_window_layers=70, model_type="qwen2", num_attention_heads=HEADS,
        num_hidden_layers=LAYERS, num_key_value_heads=KV_HEADS, rms_norm_eps=1e-6,
        rope_scaling={"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}, rope_theta=1000000.0,
        sliding_window=None, torch_dtype="float32", use_cache=True, use_sliding_window=False, vocab_size=VOCAB,
        tie_word_embeddings=tied,
    )


def hf_config(rms, tied, qwen3):
    return dict(
        architectures=["InternVLForConditionalGeneration"], downsample_ratio=0.5, image_seq_length=TOKENS_PER_TILE,
        image_token_id=CONTEXT, model_type="internvl", projector_hidden_act="gelu", text_config=text_config(tied, qwen3),
        torch_dtype="float32", vision_feature_layer=-1, vision_feature_select_strategy="default",
        tie_word_embeddings=tied,
        vision_config=dict(
            architectures=["InternVisionModel"], attention_bias=not rms, attention_dropout=0.0, hidden_act="gelu",
            hidden_dropout_prob=0.0, hidden_size=WIDTH, image_size=[SIDE, SIDE], intermediate_size=TOWER_INTER,
            layer_norm_eps=1e-6, layer_scale_init_value=0.1, model_type="internvl_vision",
            norm_type="rms_norm" if rms else "layer_norm", num_attention_heads=TOWER_HEADS, num_channels=3,
            num_hidden_layers=DEPTH, patch_size=[PATCH, PATCH], projection_dropout=0.0,
            use_absolute_position_embeddings=True, use_mask_token=False, use_mean_pooling=True, use_qk_norm=rms,
        ),
    )


def original_config(name, rms, tied, qwen3):
    llm = text_config(tied, qwen3) | dict(top_k=50, max_length=20, _name_or_path="somewhere", attn_implementation="eager")
    return dict(
        architectures=["InternVLChatModel"], downsample_ratio=0.5, dynamic_image_size=True, force_image_size=SIDE,
        llm_config=llm, max_dynamic_patch=MAX_TILES, min_dynamic_patch=1, model_type="internvl_chat", pad2square=False,
        ps_version="v2", select_layer=-1, template=TEMPLATES[name][0], torch_dtype="float32", use_backbone_lora=0,
        use_llm_lora=0, use_thumbnail=True,
        vision_config=dict(
            architectures=["InternVisionModel"], attention_dropout=0.0, drop_path_rate=0.1, dropout=0.0,
            hidden_act="gelu", hidden_size=WIDTH, image_size=SIDE, initializer_factor=0.1, initializer_range=1e-10,
            intermediate_size=TOWER_INTER, layer_norm_eps=1e-6, model_type="intern_vit_6b",
            norm_type="rms_norm" if rms else "layer_norm", num_attention_heads=TOWER_HEADS, num_hidden_layers=DEPTH,
            patch_size=PATCH, qk_normalization=rms, qkv_bias=not rms, use_flash_attn=False,
        ),
    )


def build_tokenizer(with_video):
    tokenizer = byte_level_bpe(CORPUS, NUM_MERGES, SPECIAL, ADDED)
    if with_video:
        tokenizer.add_special_tokens([AddedToken("<video>", special=True, normalized=False)])
    assert all(tokenizer.token_to_id(t) == i for t, i in ID.items() if with_video or t != "<video>")
    return tokenizer


def write_sidecars(directory, name, layout):
    hf = layout == "hf"
    build_tokenizer(hf).save(str(directory / "tokenizer.json"), pretty=False)
    added = {
        str(i): dict(content=t, lstrip=False, normalized=False, rstrip=False, single_word=False, special=t not in ADDED)
        for t, i in ID.items() if hf or t != "<video>"
    }
    config = dict(
        add_prefix_space=False, added_tokens_decoder=added, bos_token=None, clean_up_tokenization_spaces=False,
        eos_token="<|im_end|>", errors="replace", model_max_length=512, pad_token="<|endoftext|>",
        split_special_tokens=False, tokenizer_class="Qwen2Tokenizer", unk_token=None,
        additional_special_tokens=SPECIAL[1:],
    )
    if hf:
        named = dict(
            context_image_token="<IMG_CONTEXT>", end_image_token="</img>", start_image_token="<img>",
            video_token="<video>",
        )
        config |= named | dict(extra_special_tokens=named, processor_class="InternVLProcessor")
        config.pop("additional_special_tokens")
        (directory / "chat_template.jinja").write_text(HF_TEMPLATE)
        pixels = dict(
            do_convert_rgb=True, do_normalize=True, do_rescale=True, do_resize=True, image_mean=MEAN, image_std=STD,
            processor_class="InternVLProcessor", resample=3, rescale_factor=0.00392156862745098,
            size=dict(height=SIDE, width=SIDE),
        )
        write_json(directory / "preprocessor_config.json", pixels | dict(
            crop_to_patches=False, image_processor_type="GotOcr2ImageProcessor", max_patches=MAX_TILES, min_patches=1,
        ))
        write_json(
            directory / "video_preprocessor_config.json", pixels | dict(video_processor_type="InternVLVideoProcessor")
        )
        write_json(directory / "processor_config.json", dict(
            image_seq_length=TOKENS_PER_TILE, processor_class="InternVLProcessor",
        ))
    else:
        # The published text-only template of the language model, which the model's own code never uses.
        config["chat_template"] = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
        write_json(directory / "preprocessor_config.json", dict(
            crop_size=SIDE, do_center_crop=True, do_normalize=True, do_resize=True,
            feature_extractor_type="CLIPFeatureExtractor", image_mean=MEAN, image_std=STD, resample=3, size=SIDE,
        ))
    write_json(directory / "tokenizer_config.json", config)
    write_json(directory / "generation_config.json", dict(eos_token_id=EOT, transformers_version="4.37.2"))


def write_checkpoints():
    for name, (layout, rms, tied, qwen3, seed) in CHECKPOINTS.items():
        directory = fixtures.CHECKPOINTS / name
        shutil.rmtree(directory, ignore_errors=True)
        tensors = {n: p.detach() for n, p in new_original(rms, tied, qwen3, seed).named_parameters()}
        if layout == "hf":
            tensors, config = to_hf(tensors), hf_config(rms, tied, qwen3)
        else:
            config = original_config(name, rms, tied, qwen3)
        save_tensors(directory / "model.safetensors", tensors, format="pt")
        write_json(directory / "config.json", config)
        write_sidecars(directory, name, layout)


class Hf:
    """transformers' model behind the same call as `Original`."""

    def __init__(self, name):
        self.model = InternVLForConditionalGeneration.from_pretrained(
            fixtures.CHECKPOINTS / name, attn_implementation="eager", dtype=torch.float32
        ).eval()

    def __call__(self, ids, pixels):
        ids = torch.tensor([ids])
        out = self.model(
            input_ids=ids, pixel_values=pixels, attention_mask=torch.ones_like(ids), use_cache=False,
            position_ids=torch.arange(ids.shape[1])[None],
        )
        return out.logits[0]

    def features(self, pixels):
        return self.model.model.get_image_features(pixels, vision_feature_layer=-1,
                                                   vision_feature_select_strategy="default").pooler_output.flatten(0, 1)

    def zero_grad(self):
        self.model.zero_grad(set_to_none=True)

    @staticmethod
    def published_name(n):
        if n == "lm_head.weight":
            return "language_model.lm_head.weight"
        return n.removeprefix("model.").replace("language_model.", "language_model.model.", 1)

    def published_parameters(self):
        """Published name -> parameter."""
        return {self.published_name(n): p for n, p in self.model.named_parameters()}

    def gradients(self):
        """Name in the program -> gradient."""
        grads = {n: p.grad for n, p in self.published_parameters().items() if p.grad is not None}
        return {n: oriented(n, g) for n, g in grads.items()}


def load(name):
    layout, rms, tied, qwen3, seed = CHECKPOINTS[name]
    if layout == "hf":
        return Hf(name)
    model = new_original(rms, tied, qwen3, seed)
    model.published_parameters = lambda: dict(model.named_parameters())
    # An expert that no row chose has no gradient.
    grad = lambda n, p: torch.zeros_like(p) if p.grad is None and ".experts." in n else p.grad
    model.gradients = lambda: fused({
        n: g for n, p in model.named_parameters() if (g := grad(n, p)) is not None
    })
    return model


def render(name, text, media):
    """The prompt as a string, media expanded: the hf template through the processor's rule, the original one as
    `InternVLChatModel.chat` writes it."""
    spell = {}
    for i, medium in enumerate(media):
        block = lambda tiles: "<img>" + "<IMG_CONTEXT>" * TOKENS_PER_TILE * tiles + "</img>"
        if isinstance(medium, list):
            spell[i] = "\n".join(f"Frame{k + 1}: {block(1)}" for k in range(len(medium)))
        else:
            spell[i] = block(len(tiles_u8(open_rgb(MEDIA / medium))))
    pieces = re.split(r"(<image>|<video>)", text)
    if media and len(pieces) == 1:
        pieces = sum((["<video>" if isinstance(m, list) else "<image>", ""] for m in media), []) + [text]
        pieces = [p for p in pieces if p]
    if CHECKPOINTS[name][0] == "hf":
        parts = [spell_part + "\n" if p in ("<image>", "<video>") else p for p, spell_part in number(pieces, spell)]
        return "<|im_start|>user\n" + "".join(parts) + "<|im_end|>\n<|im_start|>assistant\n"
    _, system, end = TEMPLATES[name]
    out, leading = "", True
    pieces = [p for p in pieces if p]
    for at, (p, spelled) in enumerate(number(pieces, spell)):
        if p in ("<image>", "<video>"):
            follows = pieces[at + 1] if at + 1 < len(pieces) else ""
            out += spelled + ("\n" if leading and not follows.startswith("\n") else "")
        else:
            out, leading = out + p, False
    return f"<|im_start|>system\n{system}{end}<|im_start|>user\n{out}{end}<|im_start|>assistant\n"


def number(pieces, spell):
    """Pairs every piece with the spelling of its medium, if it is one."""
    at = iter(range(len(spell)))
    return [(p, spell[next(at)] if p in ("<image>", "<video>") else None) for p in pieces]


def pixels_u8(media):
    """Tiles and frames of all media, [n, 3, SIDE, SIDE]; None without media."""
    parts = []
    for medium in media:
        parts += [tiles_u8(open_rgb(MEDIA / p), most=1) for p in medium] if isinstance(medium, list) else \
            [tiles_u8(open_rgb(MEDIA / medium))]
    return torch.cat(parts) if parts else None


def logp_of(model, prompt, completion, pixels):
    rows = model(prompt + completion, pixels)[len(prompt) - 1 : -1]
    return rows, rows.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def run_case(model, name, case, inputs):
    tokenizer = build_tokenizer(CHECKPOINTS[name][0] == "hf")
    text, media = CASES[case]
    prompt = tokenizer.encode(render(name, text, media), add_special_tokens=False).ids
    pixels = normalise(inputs["u8"]) if inputs["u8"] is not None else None
    out = {"prompt_ids": torch.tensor(prompt)}
    if pixels is not None:
        with torch.no_grad():
            out["features"] = model.features(pixels)
    model.zero_grad()
    rows, logp = logp_of(model, prompt, inputs["completion"], pixels)
    loss = (inputs["coefficients"] * logp).sum()
    loss.backward()
    out |= dict(logits=rows, logp=logp, loss=loss.reshape(1))
    for n, g in model.gradients().items():
        out[f"sketch.{n}"] = sketch(g)
    tokens, margins = greedy(lambda tokens: model(prompt + tokens, pixels)[-1], GREEDY_TOKENS)
    print(f"{name} {case}: L={len(prompt)} loss={float(loss.detach()):.3f} min margin={min(margins):.4f} {tokens}")
    assert min(margins) > 1e-3 and CONTEXT not in tokens, (name, case)
    out["greedy"] = torch.tensor(tokens)
    return out


def write_cases():
    generator = torch.Generator().manual_seed(17)
    lines, cases = [], {}
    for case, (text, media) in CASES.items():
        lines.append(row_of(case, text, media))
        completion = torch.randint(0, 256, (8,), generator=generator).tolist()
        completion[5] = ID["<answer>"]
        cases[case] = dict(
            u8=pixels_u8(media), completion=completion, coefficients=torch.randn(8, generator=generator)
        )
        tensors = dict(completion_ids=torch.tensor(completion), coefficients=cases[case]["coefficients"])
        if media:
            tensors["u8"] = cases[case]["u8"]
        save_tensors(ROOT / f"{case}.safetensors", tensors)
    ROOT.mkdir(parents=True, exist_ok=True)
    (ROOT / "rows.jsonl").write_text("\n".join(lines) + "\n")
    for name, wanted in RESULTS.items():
        model = load(name)
        for case in wanted:
            save_tensors(ROOT / f"{case}.{name}.safetensors", run_case(model, name, case, cases[case]))
    return cases


def check_layouts(cases):
    """Both layouts are one function: transformers' model and `Original` on the same weights and ids."""
    for hf in ("internvl_hf", "internvl_rms_hf", "internvl3_5_hf", "internvl3_5_moe_hf"):
        original = hf.replace("_hf", "_original")
        prompt = build_tokenizer(True).encode(render(hf, *CASES["E"]), add_special_tokens=False).ids
        a, b = load(hf), load(original)
        pixels = normalise(cases["E"]["u8"])
        for model in (a, b):
            model.zero_grad()
            _, logp = logp_of(model, prompt, cases["E"]["completion"], pixels)
            (cases["E"]["coefficients"] * logp).sum().backward()
        theirs, ours = a.gradients(), to_hf(b.gradients())
        worst = max(float((theirs[n] - g).norm() / g.norm().clamp_min(1e-3)) for n, g in ours.items())
        assert ours.keys() == theirs.keys() and worst < 1e-4, worst
        print(hf, "against", original, "largest relative gradient difference", worst)
        # Tiles of another size than the tower's own: positions are interpolated.
        wide = torch.nn.functional.interpolate(pixels, size=(42, 42), mode="bilinear")
        with torch.no_grad():
            assert torch.allclose(a.features(wide), b.features(wide), atol=1e-5)


def check_processor(cases):
    """Ids and pixels of image cases are what the checkpoint's own processor makes."""
    directory = fixtures.CHECKPOINTS / "internvl_hf"
    processor = AutoProcessor.from_pretrained(directory)
    processor.image_processor = GotOcr2ImageProcessorPil.from_pretrained(directory)
    for case in "ABC":
        text, media = CASES[case]
        content = [
            {"type": "image"} if p == "<image>" else {"type": "text", "text": p}
            for p in re.split(r"(<image>)", text) if p
        ]
        prompt = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        images = [open_rgb(MEDIA / m) for m in media] or None
        out = processor(text=[prompt], images=images, return_tensors="pt")
        ids = build_tokenizer(True).encode(render("internvl_hf", text, media), add_special_tokens=False).ids
        assert out["input_ids"][0].tolist() == ids, case
        if media:
            assert torch.equal(out["pixel_values"], normalise(cases[case]["u8"])), case


def write_positions(cases):
    """Features of tiles larger than the tower's own."""
    wide = torch.nn.functional.interpolate(normalise(cases["C"]["u8"])[:2], size=(42, 42), mode="bilinear")
    model = load("internvl_original")
    features = model.features(wide)
    (features * torch.linspace(-1, 1, features.numel()).view_as(features)).sum().backward()
    save_tensors(ROOT / "interpolated.safetensors", dict(
        pixels=wide, features=features, position_grad=model.vision_model.embeddings.position_embedding.grad[0],
    ))


def write_tilings():
    generator = torch.Generator().manual_seed(1)
    rows = []
    for k in range(200):
        w, h = (int(x) for x in torch.randint(1, 3000, (2,), generator=generator))
        least, most = [(1, 12), (1, 6), (2, 12), (1, 40), (4, 4)][k % 5]
        if k % 7 == 0:
            h = w
        if k % 11 == 0:
            w = 2 * h
        grid = get_optimal_tiled_canvas((h, w), (448, 448), least, most)
        assert tuple(grid) == arrangement(w, h, 448, least, most)
        rows.append([w, h, least, most, *grid])
    text = ",\n".join(json.dumps(r) for r in rows)
    (fixtures.OUT.parents[2] / "media/tests/data/tilings.json").write_text(f"[\n{text}\n]\n")


def write_replay():
    """Three steps of GRPO on the original layout, all in this file's own PyTorch."""
    for name in ("internvl_original", "internvl3_5_original"):
        write_replay_of(name)


def write_replay_of(name):
    encode = lambda s: build_tokenizer(False).encode(s, add_special_tokens=False).ids
    prepared = []
    for row in ROWS:
        media = []
        if "image" in row["media"]:
            media = ["shapes.png"]
        elif "video" in row["media"]:
            media = [FRAMES]
        rewards = torch.tensor(row["rewards"], dtype=torch.float64)
        u8 = pixels_u8(media)
        prepared.append(dict(
            row=row["id"], prompt=encode(render(name, row["question"], media)),
            pixels=None if u8 is None else normalise(u8), completions=[encode(c) for c in row["completions"]],
            advantages=((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist(),
        ))

    logp = lambda model, item, completion, dtype: logp_of(
        model, item["prompt"], completion, None if item["pixels"] is None else item["pixels"].to(dtype)
    )[1]
    three_steps(name, load(name), prepared, logp, lambda n: n)


def three_steps(name, model, prepared, logp_of_item, published_name):
    """Three steps of GRPO on prompts with completions and advantages, in f32 and in f64; writes what they gave. Weights go
    under their published names."""

    def train(model, dtype):
        logps = lambda: [logp_of_item(model, i, c, dtype) for i in prepared for c in i["completions"]]
        names = dict(model.named_parameters())
        decayed = set(Trainer.get_decay_parameter_names(None, model))
        groups = [
            dict(params=[p for n, p in names.items() if (n in decayed) == d], weight_decay=HYPER["weight_decay"] * d)
            for d in (True, False)
        ]
        optimizer = torch.optim.AdamW(
            groups, lr=HYPER["learning_rate"], betas=(HYPER["adam_beta1"], HYPER["adam_beta2"]),
            eps=HYPER["adam_epsilon"],
        )
        with torch.no_grad():
            ref = logps()
        advantages = [a for i in prepared for a in i["advantages"]]
        records, first = [], {}
        for step in range(3):
            optimizer.zero_grad(set_to_none=True)
            now = logps()
            policy, kl = grpo_terms(now, ref, advantages)
            loss = policy + HYPER["beta"] * kl
            loss.backward()
            if step == 0:
                first = {n: p.grad.clone() for n, p in names.items() if p.grad is not None}
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), HYPER["max_grad_norm"])
            optimizer.step()
            records.append(dict(
                loss=loss.detach(), policy_loss=policy.detach(), kl=kl.detach(), grad_norm=norm,
                logp=torch.cat(now).detach(),
            ))
        return records, torch.cat(ref), sorted(n for n in names if n not in decayed), first

    start = copy.deepcopy(model)
    records, ref, no_decay, first = train(model, torch.float32)
    exact = copy.deepcopy(start).double()
    exact_records, _, _, _ = train(exact, torch.float64)
    before, precise = dict(start.named_parameters()), dict(exact.named_parameters())
    out = {f"step{k}.logp": r["logp"] for k, r in enumerate(records)} | {"ref_logp": ref}
    deviation = {}
    for n, p in model.named_parameters():
        if n not in first:
            out[f"delta_sketch.{published_name(n)}"] = torch.zeros(9)
            continue
        out[f"delta_sketch.{published_name(n)}"] = sketch(p - before[n])
        out[f"step0.sketch.{published_name(n)}"] = sketch(first[n])
        deviation[published_name(n)] = float(((p - precise[n]).norm() / (p - before[n]).norm()).detach())
    worst = max(deviation, key=deviation.get)
    scalars = lambda r: {k: float(r[k]) for k in ("loss", "policy_loss", "kl", "grad_norm")}
    save_tensors(OUT / f"replay/{name}.safetensors", out)
    write_json(OUT / f"replay/{name}.json", dict(
        hyper=HYPER,
        rows=[
            dict(id=i["row"], prompt_ids=i["prompt"], completion_ids=i["completions"], advantages=i["advantages"])
            for i in prepared
        ],
        steps=[scalars(r) for r in records], no_decay=sorted(published_name(n) for n in no_decay),
        float64_steps=[scalars(r) for r in exact_records],
        # Gradients that are 0 but for rounding, of biases of keys: what AdamW makes of them is arbitrary.
        rounding=sorted(n for n, d in deviation.items() if d > 5e-3),
        float64_deviation=dict(
            worst=worst, worst_value=deviation[worst], median=sorted(deviation.values())[len(deviation) // 2]
        ),
    ))
    for r in records:
        print(name, scalars(r))
    print(worst, deviation[worst])


def main():
    write_checkpoints()
    cases = write_cases()
    check_layouts(cases)
    check_processor(cases)
    write_positions(cases)
    write_tilings()
    write_replay()


if __name__ == "__main__":
    main()
