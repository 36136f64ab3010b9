"""Cases A-E: inputs, positions, vision stages, logits, greedy continuation and gradients for both families."""

import torch
from fixtures import (
    CHECKPOINTS, EOT, FRAMES, ID, IM_END, IMG, MEDIA, NAMES, OUT, VE, VID, VS, extend, family_of, gradients, greedy, load_model,
    open_rgb, position_ids, process_frames, process_images, save_tensors, tf5_position_ids,
)
from jinja2 import Environment
from make_checkpoints import CHAT_TEMPLATE, build_tokenizer
from transformers import AutoProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

CASES = OUT / "cases"
GREEDY_TOKENS = 12


def render(messages) -> str:
    env = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    return env.from_string(CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=True)


def expand(ids, image_grids, video_grids):
    """Each placeholder token becomes t*h*w/4 copies."""
    images, videos, out = iter(image_grids), iter(video_grids), []
    for i in ids:
        if i in (IMG, VID):
            grid = next(images if i == IMG else videos)
            out += [i] * (int(grid[0]) * int(grid[1]) * int(grid[2]) // 4)
        else:
            out.append(i)
    return out


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def text(s):
    return {"type": "text", "text": s}


def as_u8(pixels):
    """Undo (u8/255 - mean)/std, checking that redoing it gives the same bits."""
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(1, 3, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(1, 3, 1)
    rows = pixels.view(-1, 3, 2 * 14 * 14)
    u8 = ((rows * std + mean) * 255).round().to(torch.uint8)
    again = ((u8.double() * (1 / 255)).float() - mean) / std
    assert torch.equal(again, rows)
    return u8.view(pixels.shape)


def build_inputs():
    """Case name -> inputs shared by both families. Pixel rows are stored as u8, which give the f32 bits back."""
    tokenizer = build_tokenizer()
    encode = lambda s: tokenizer.encode(s, add_special_tokens=False).ids
    generator = torch.Generator().manual_seed(11)
    cases = {}

    grids_a = [[1, 10, 6], [1, 8, 8]]
    video_a = [[4, 4, 4]]
    ids = [5, 6, VS] + [IMG] * 15 + [VE, 7, VS] + [IMG] * 16 + [VE, 8, VS] + [VID] * 16 + [VE, 9, 10, 11]
    assert len(ids) == 60
    noise = lambda rows: torch.randint(0, 256, (rows, 1176), generator=generator, dtype=torch.uint8)
    cases["A"] = dict(ids=ids, images=grids_a, videos=video_a, seconds=[1.0], image_u8=noise(124), video_u8=noise(64))

    ids = encode(render(user(text("How many shapes are there? Think, then answer 42, naïve café.\n"))))
    cases["B"] = dict(ids=ids, images=[], videos=[], seconds=[])

    pixels, grids = process_images(["shapes.png"])
    ids = expand(encode(render(user({"type": "image"}, text("\nWhat is shown in the image?")))), grids, [])
    cases["C"] = dict(ids=ids, images=grids.tolist(), videos=[], seconds=[], image_u8=as_u8(pixels), image_f32=pixels)

    frames, video = process_frames(FRAMES)
    ids = expand(encode(render(user({"type": "video"}, text("Which way does the ball move?")))), [], video)
    for case, seconds in (("D1", 0.5), ("D2", 1.0)):
        cases[case] = dict(ids=ids, images=[], videos=video.tolist(), seconds=[seconds], video_u8=as_u8(frames))

    pixels, grids = process_images(["alpha.png", "shapes.png"])
    short, short_grid = process_frames(FRAMES[:4])
    content = [
        text("First "), {"type": "image"}, text(" then "), {"type": "video"}, text(" and "), {"type": "image"},
        text(": which is red?"),
    ]
    ids = expand(encode(render(user(*content))), grids, short_grid)
    cases["E"] = dict(
        ids=ids, images=grids.tolist(), videos=short_grid.tolist(), seconds=[0.5], image_u8=as_u8(pixels),
        video_u8=as_u8(short),
    )

    for case in cases.values():
        case["completion"] = torch.randint(0, 256, (8,), generator=generator).tolist()
        case["coefficients"] = torch.randn(8, generator=generator)
    # D1 and D2 differ in the positions alone, and for Qwen2-VL in nothing.
    cases["D2"] |= {k: cases["D1"][k] for k in ("completion", "coefficients")}
    cases["A"]["completion"][4] = ID["<answer>"]
    cases["B"]["completion"][7] = IM_END
    return cases


def pixel_rows(u8, case):
    """u8 rows -> model input. Case A is noise, (u8 - 128) / 64; the others are normalised images."""
    if case == "A":
        return (u8.float() - 128) / 64
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(1, 3, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(1, 3, 1)
    rows = (u8.view(-1, 3, 392).double() * (1 / 255)).float()
    return ((rows - mean) / std).view(u8.shape)


def model_inputs(inputs, case):
    kwargs = {}
    if inputs["images"]:
        kwargs["pixel_values"] = pixel_rows(inputs["image_u8"], case)
        kwargs["image_grid_thw"] = torch.tensor(inputs["images"])
    if inputs["videos"]:
        kwargs["pixel_values_videos"] = pixel_rows(inputs["video_u8"], case)
        kwargs["video_grid_thw"] = torch.tensor(inputs["videos"])
    return kwargs


def logits_of(model, ids, positions, kwargs):
    """[L, V] with explicit positions, no cache."""
    ids = torch.tensor([ids])
    kinds = torch.where(ids == IMG, 1, torch.where(ids == VID, 2, 0)).int()
    out = model(
        input_ids=ids, position_ids=positions.unsqueeze(1), attention_mask=torch.ones_like(ids), use_cache=False,
        mm_token_type_ids=kinds, **kwargs,
    )
    return out.logits[0]


def vision_stages(model, pixels, grid):
    """Outputs of patch embedding, every block (Qwen2.5-VL: rows in window order) and the merger (original order)."""
    stages, hooks, visual = {}, [], model.model.visual
    keep = lambda key: lambda _m, _i, out: stages.__setitem__(key, out[0] if isinstance(out, tuple) else out)
    hooks.append(visual.patch_embed.register_forward_hook(keep("patch_embed")))
    for i, block in enumerate(visual.blocks):
        hooks.append(block.register_forward_hook(keep(f"block.{i}")))
    with torch.no_grad():
        stages["merger"] = visual(pixels, grid_thw=grid).pooler_output
    for hook in hooks:
        hook.remove()
    return stages


def run_case(model, name, case, inputs):
    family = family_of(name)
    prompt, completion = inputs["ids"], inputs["completion"]
    kwargs = model_inputs(inputs, case)
    positions = position_ids(prompt, family, inputs["images"], inputs["videos"], inputs["seconds"])
    if kwargs:
        tf5 = tf5_position_ids(
            model, prompt, kwargs.get("image_grid_thw"), kwargs.get("video_grid_thw"), inputs["seconds"] or None
        )
        agree = bool(torch.equal(tf5, positions))
        assert agree == (case in ("C", "E")), (name, case)
    out = {"position_ids": positions}

    if name.endswith("_tied"):
        for kind in ("image", "video"):
            pixels = kwargs.get("pixel_values" if kind == "image" else "pixel_values_videos")
            if pixels is not None:
                stages = vision_stages(model, pixels, kwargs[f"{kind}_grid_thw"])
                keep_all = case == "A" or (case == "C" and kind == "image")
                out |= {f"{kind}.{k}": v for k, v in stages.items() if keep_all or k == "merger"}
        captured = []
        hook = model.model.language_model.register_forward_pre_hook(
            lambda _m, _a, kw: captured.append(kw["inputs_embeds"]), with_kwargs=True
        )
        with torch.no_grad():
            logits_of(model, prompt, positions, kwargs)
        hook.remove()
        if case in ("A", "E"):
            out["inputs_embeds"] = captured[0][0]

    model.zero_grad(set_to_none=True)
    logits = logits_of(model, prompt + completion, extend(positions, len(completion)), kwargs)
    rows = logits[len(prompt) - 1 : -1]
    logp = rows.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
    loss = (inputs["coefficients"] * logp).sum()
    loss.backward()
    out["logits"] = logits if case == "A" and name.endswith("_tied") else rows
    out["logp"], out["loss"] = logp, loss.reshape(1)
    out |= gradients(model, full=case == "A" and name.endswith("_tied"))

    tokens, margins = greedy(
        lambda tokens: logits_of(model, prompt + tokens, extend(positions, len(tokens)), kwargs)[-1], GREEDY_TOKENS
    )
    print(f"{name} {case}: L={len(prompt)} loss={float(loss.detach()):.3f} min margin={min(margins):.4f} {tokens}")
    assert min(margins) > 1e-3, (name, case)
    assert not any(EOT <= t <= VID or t > ID["</answer>"] for t in tokens), (name, case)
    out["greedy"] = torch.tensor(tokens)
    return out


def check_against_processor(inputs):
    """Case C is what the checkpoint's own processor makes of the message."""
    processor = AutoProcessor.from_pretrained(CHECKPOINTS / "qwen2_5_vl_tied")
    processor.image_processor = Qwen2VLImageProcessorPil.from_pretrained(CHECKPOINTS / "qwen2_5_vl_tied")
    messages = user({"type": "image"}, text("\nWhat is shown in the image?"))
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    out = processor(text=[prompt], images=[open_rgb(MEDIA / "shapes.png")], return_tensors="pt")
    assert out["input_ids"][0].tolist() == inputs["ids"]
    assert torch.equal(out["pixel_values"], inputs["image_f32"])
    assert out["image_grid_thw"].tolist() == inputs["images"]


def main():
    cases = build_inputs()
    check_against_processor(cases["C"])
    for case, inputs in cases.items():
        tensors = {
            "prompt_ids": torch.tensor(inputs["ids"]),
            "completion_ids": torch.tensor(inputs["completion"]),
            "coefficients": inputs["coefficients"],
            "second_per_grid": torch.tensor(inputs["seconds"], dtype=torch.float32),
            "image_grid": torch.tensor(inputs["images"], dtype=torch.int64).view(-1, 3),
            "video_grid": torch.tensor(inputs["videos"], dtype=torch.int64).view(-1, 3),
        }
        tensors |= {k: inputs[k] for k in ("image_u8", "video_u8") if k in inputs and case != "D2"}
        save_tensors(CASES / f"{case}.safetensors", tensors)
    for name in NAMES:
        model = load_model(name)
        for case, inputs in cases.items():
            # The untied head changes nothing before it, so those checkpoints run one case with everything in it.
            if name.endswith("untied") and case != "E":
                continue
            save_tensors(CASES / f"{case}.{name}.safetensors", run_case(model, name, case, inputs))


if __name__ == "__main__":
    main()
