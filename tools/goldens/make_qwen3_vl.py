"""Qwen3-VL, dense and with experts: checkpoints, cases, three AdamW steps. The rows of the cases are read by the tests as they stand, so prompts and
pixels are compared from the file on."""

import json
import math
import re
import shutil
import tempfile
from pathlib import Path

import fixtures
import numpy as np
import torch
from fixtures import (
    EOT, FRAMES, ID, IM_END, IMG, MEDIA, OUT, VE, VID, VOCAB, VS, extend, greedy, inputs, is_loud, open_rgb, oriented, randomise,
    row_of, save_tensors, sketch, write_json,
)
from make_checkpoints import CHAT_TEMPLATE, DEFAULT_SYSTEM, build_tokenizer, tokenizer_config
from make_internvl import number, three_steps
from make_replay import ROWS
from transformers import (
    PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration, Qwen3VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

ROOT = OUT / "qwen3_vl"
GREEDY_TOKENS = 12
MIN_PIXELS, MAX_PIXELS = 56 * 56, 32 * 32 * 16
# name -> key and value heads, blocks whose features join the language model, tied, seed
CHECKPOINTS = {
    # Seeds: every greedy step of every case is decided clearly.
    "qwen3_vl": (2, [0, 1, 3], True, 49),
    "qwen3_vl_untied": (1, [1, 2], False, 1),
    "qwen3_vl_moe": (2, [0, 2], False, 2),
}
# Seven experts, three of them for each row.
EXPERTS = dict(
    decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=20, norm_topk_prob=True, num_experts=7,
    num_experts_per_tok=3,
)
# Qwen2.5-VL's template without a system turn.
TEMPLATE = CHAT_TEMPLATE.replace(DEFAULT_SYSTEM, "")
# question, media, frames a second of the video, limits of the row
LIMITS = dict(min_pixels=MIN_PIXELS, max_pixels=12544)
CASES = {
    "A": ("Picture one <image> and picture two <image>: are they equal?", ["noise.png", "shapes.png"], None, {}),
    "B": ("How many shapes are there? Think, then answer 42, naïve café.\n", [], None, {}),
    "C": ("<image>\nWhat is shown in the image?", ["shapes.png"], None, {}),
    # An odd number of frames; times that round.
    "D": ("<video>Which way does the ball move?", [FRAMES[:5]], 3.0, LIMITS),
    "E": ("First <image> then <video> and <image>: which is red?", ["alpha.png", FRAMES[:4], "shapes.png"], None, LIMITS),
    # Without a placeholder media come first.
    "F": ("What is shown in the image?", ["noise.png"], None, {}),
}
RESULTS = {"qwen3_vl": "ABCDEF", "qwen3_vl_untied": "CE", "qwen3_vl_moe": "BCDE"}


def is_moe(name):
    return name.endswith("moe")


def classes(name):
    if is_moe(name):
        return Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
    return Qwen3VLConfig, Qwen3VLForConditionalGeneration


def hub_config(name):
    """config.json in the form of the hub."""
    kv, deep, tied, _ = CHECKPOINTS[name]
    config_class, model_class = classes(name)
    return dict(
        architectures=[model_class.__name__], image_token_id=IMG, model_type=config_class.model_type,
        text_config=(EXPERTS if is_moe(name) else {}) | dict(
            attention_bias=False, attention_dropout=0.0, bos_token_id=EOT, dtype="float32", eos_token_id=IM_END,
            head_dim=16, hidden_act="silu", hidden_size=48, initializer_range=0.02, intermediate_size=80,
            max_position_embeddings=512, model_type=config_class.model_type + "_text", num_attention_heads=4, num_hidden_layers=4,
            num_key_value_heads=kv, rms_norm_eps=1e-6,
            rope_scaling=dict(mrope_interleaved=True, mrope_section=[4, 2, 2], rope_type="default"),
            rope_theta=5000000, tie_word_embeddings=tied, use_cache=True, vocab_size=VOCAB,
        ),
        tie_word_embeddings=tied, transformers_version="4.57.0.dev0", video_token_id=VID,
        vision_config=dict(
            deepstack_visual_indexes=deep, depth=4, hidden_act="gelu_pytorch_tanh", hidden_size=16, in_channels=3,
            initializer_range=0.02, intermediate_size=24, model_type=config_class.model_type, num_heads=2, num_position_embeddings=25,
            out_hidden_size=48, patch_size=16, spatial_merge_size=2, temporal_patch_size=2,
        ),
        vision_end_token_id=VE, vision_start_token_id=VS,
    )


def new_config(name):
    raw = {k: v for k, v in hub_config(name).items() if k not in ("architectures", "model_type", "transformers_version")}
    return classes(name)[0](**raw)


def scale(n, p):
    if "pos_embed" in n:
        return 0.5
    gain = (1.2 if "merger" in n else 0.8) if "visual" in n else (2.0 if is_loud(n) else 1.2)
    return (1.0 if ".experts." in n else gain) / math.sqrt(inputs(n, p))


def new_model(name):
    """Random weights with a useful spread: no bias is 0, no norm weight is 1, logits differ by more than rounding."""
    model = classes(name)[1]._from_config(
        new_config(name), attn_implementation="eager", dtype=torch.float32
    ).eval()
    randomise(sorted(model.named_parameters()), CHECKPOINTS[name][-1], scale)
    return model


def parameters(model):
    """Published names are those of the modules; a tied head appears once, as the embedding."""
    return dict(model.named_parameters())


def image_processor():
    return Qwen2VLImageProcessorPil(
        size=dict(shortest_edge=MIN_PIXELS, longest_edge=MAX_PIXELS), patch_size=16, temporal_patch_size=2, merge_size=2,
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )


def pixels_of(medium):
    """(patch rows, [t, h, w]) of an image, or of the frames of a video, each resized as an image."""
    frames = medium if isinstance(medium, list) else [medium]
    out = image_processor()(images=[open_rgb(MEDIA / p) for p in frames], return_tensors="pt")
    rows, (_, h, w) = out["pixel_values"].float(), out["image_grid_thw"][0].tolist()
    if not isinstance(medium, list):
        return rows, [1, h, w]
    single = rows.view(len(frames), h * w, 3, 2, 16 * 16)[:, :, :, 0]
    single = torch.cat([single, single[-1:]]) if len(frames) % 2 else single
    video = torch.stack([single[0::2], single[1::2]], dim=3)
    return video.reshape(-1, 3 * 2 * 16 * 16), [len(single) // 2, h, w]


def write_sidecars(directory, name):
    build_tokenizer().save(str(directory / "tokenizer.json"), pretty=False)
    write_json(directory / "tokenizer_config.json", tokenizer_config(with_template=False))
    shared = dict(patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    image = dict(size=dict(longest_edge=MAX_PIXELS, shortest_edge=MIN_PIXELS), **shared,
                 image_processor_type="Qwen2VLImageProcessorFast")
    video = dict(size=dict(longest_edge=25165824, shortest_edge=4096), **shared,
                 video_processor_type="Qwen3VLVideoProcessor")
    if name == "qwen3_vl":
        # The published place of the template.
        write_json(directory / "chat_template.json", dict(chat_template=TEMPLATE))
        write_json(directory / "preprocessor_config.json", image | dict(processor_class="Qwen3VLProcessor"))
        write_json(directory / "video_preprocessor_config.json", video | dict(processor_class="Qwen3VLProcessor"))
    else:
        # The place where transformers 5 saves it.
        (directory / "chat_template.jinja").write_text(TEMPLATE)
        write_json(directory / "processor_config.json", dict(
            image_processor=image, processor_class="Qwen3VLProcessor", video_processor=video,
        ))
    write_json(directory / "generation_config.json", dict(
        bos_token_id=EOT, pad_token_id=EOT, do_sample=True, eos_token_id=[IM_END, EOT], top_p=0.8, top_k=20,
        temperature=0.7, repetition_penalty=1.0, transformers_version="4.56.0",
    ))


def write_checkpoints():
    for name, (_, _, tied, _) in CHECKPOINTS.items():
        directory = fixtures.CHECKPOINTS / name
        shutil.rmtree(directory, ignore_errors=True)
        model = new_model(name)
        tensors = {n: p.detach() for n, p in parameters(model).items()}
        assert ("lm_head.weight" in tensors) != tied
        # transformers writes these names.
        with tempfile.TemporaryDirectory() as scratch:
            model.save_pretrained(scratch)
            loaded = classes(name)[1].from_pretrained(scratch, dtype=torch.float32)
            from safetensors import safe_open
            with safe_open(f"{scratch}/model.safetensors", "pt") as file:
                assert set(file.keys()) == set(tensors), set(file.keys()) ^ set(tensors)
            assert all(torch.equal(p, tensors[n]) for n, p in parameters(loaded).items())
            config = json.loads((Path(scratch) / "config.json").read_text())
        assert "rope_parameters" in config["text_config"]
        # Published files have experts in the program's form.
        tensors = {n: oriented(n, p) for n, p in tensors.items()}
        save_tensors(directory / "model.safetensors", tensors, format="pt")
        if is_moe(name):
            loaded = classes(name)[1].from_pretrained(write_config(directory, hub_config(name)), dtype=torch.float32)
            assert all(torch.equal(p, model.get_parameter(n)) for n, p in loaded.named_parameters())
        write_json(directory / "config.json", config if name == "qwen3_vl_untied" else hub_config(name))
        write_sidecars(directory, name)


def write_config(directory, config):
    write_json(directory / "config.json", config)
    return directory


def spelled(medium, fps):
    """What stands in place of the placeholder token of a medium."""
    _, (t, h, w) = pixels_of(medium)
    if not isinstance(medium, list):
        return "<|image_pad|>" * (h * w // 4)
    times = [i / fps for i in range(len(medium))]
    times += times[-1:] * (len(times) % 2)
    middle = [(a + b) / 2 for a, b in zip(times[0::2], times[1::2])]
    assert len(middle) == t
    frame = "<|vision_start|>" + "<|video_pad|>" * (h * w // 4) + "<|vision_end|>"
    return "".join(f"<{m:.1f} seconds>{frame}" for m in middle)


def pieces_of(text, media):
    pieces = re.split(r"(<image>|<video>)", text)
    if media and len(pieces) == 1:
        pieces = ["<video>" if isinstance(m, list) else "<image>" for m in media] + [text]
    return [p for p in pieces if p]


def render(text, media, fps):
    """The prompt as a string, media expanded."""
    spell = [f"<|vision_start|>{spelled(m, fps or 2.0)}<|vision_end|>" for m in media]
    parts = [s if p in ("<image>", "<video>") else p for p, s in number(pieces_of(text, media), spell)]
    return "<|im_start|>user\n" + "".join(parts) + "<|im_end|>\n<|im_start|>assistant\n"


def encode(text):
    return build_tokenizer().encode(text, add_special_tokens=False).ids


def inputs_of(media):
    """Media as the model takes them."""
    made = [(isinstance(m, list), *pixels_of(m)) for m in media]
    out = {}
    for video, pixels, grid in ((False, "pixel_values", "image_grid_thw"), (True, "pixel_values_videos", "video_grid_thw")):
        own = [(rows, shape) for is_video, rows, shape in made if is_video == video]
        if own:
            out |= {pixels: torch.cat([rows for rows, _ in own]), grid: torch.tensor([shape for _, shape in own])}
    return out


def kinds_of(ids):
    return torch.where(ids == IMG, 1, torch.where(ids == VID, 2, 0)).int()


def positions_of(model, ids, media):
    ids = torch.tensor([ids])
    grids = {k: v.clone() for k, v in media.items() if k.endswith("thw")}
    positions, _ = model.model.get_rope_index(input_ids=ids, mm_token_type_ids=kinds_of(ids), **grids)
    return positions[:, 0]


def logits_of(model, ids, positions, media):
    ids = torch.tensor([ids])
    media = {k: v.clone().to(model.dtype) if k.startswith("pixel") else v.clone() for k, v in media.items()}
    return model(
        input_ids=ids, position_ids=positions.unsqueeze(1), attention_mask=torch.ones_like(ids), use_cache=False,
        mm_token_type_ids=kinds_of(ids), **media,
    ).logits[0]


def logp_of(model, prompt, completion, media):
    positions = extend(positions_of(model, prompt, media), len(completion))
    rows = logits_of(model, prompt + completion, positions, media)[len(prompt) - 1 : -1]
    return rows, rows.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def features(model, media):
    """Of each medium in prompt order: what stands in the prompt, then what joins behind the first block, and so on."""
    out = []
    for medium in media:
        rows, grid = pixels_of(medium)
        made = model.model.visual(rows, grid_thw=torch.tensor([grid]), return_dict=True)
        out += [made.pooler_output, *made.deepstack_features]
    return torch.cat(out)


def balance(model, prompt, completion, pixels):
    """transformers' loss that balances the use of experts, of one router at a time, divided by the experts of a row: 1 if all are
    used equally. Only the rows that score the completion leave the last block."""
    routers = [m for n, m in model.named_modules() if n.endswith("mlp.gate")]
    kept = []
    hooks = [m.register_forward_hook(lambda _, __, out: kept.append(out[0])) for m in routers]
    model.zero_grad(set_to_none=True)
    logp_of(model, prompt, completion, pixels)
    [hook.remove() for hook in hooks]
    # The last token of a completion is not read.
    kept = [logits[:-1] for logits in kept[:-1]] + [kept[-1][len(prompt) - 1 : -1]]
    topk, count = EXPERTS["num_experts_per_tok"], EXPERTS["num_experts"]
    loss = sum(load_balancing_loss_func((logits,), count, topk) for logits in kept) / topk
    loss.backward()
    grads = {n: p.grad for n, p in parameters(model).items() if p.grad is not None}
    return {"balance": loss.reshape(1)} | {f"balance.sketch.{n}": sketch(oriented(n, g)) for n, g in grads.items()}


def run_case(model, name, case, given):
    text, media, fps, _ = CASES[case]
    prompt, pixels = encode(render(text, media, fps)), inputs_of(media)
    positions = positions_of(model, prompt, pixels)
    out = {"prompt_ids": torch.tensor(prompt), "position_ids": positions}
    if media:
        with torch.no_grad():
            out["features"] = features(model, media)
        # Patch rows themselves are compared by sketches.
        out["pixels"] = torch.stack([sketch(pixels_of(m)[0]) for m in media])
        out["grids"] = torch.tensor([pixels_of(m)[1] for m in media])
    model.zero_grad(set_to_none=True)
    rows, logp = logp_of(model, prompt, given["completion"], pixels)
    loss = (given["coefficients"] * logp).sum()
    loss.backward()
    out |= dict(logits=rows, logp=logp, loss=loss.reshape(1))
    for n, p in parameters(model).items():
        if p.grad is not None:
            assert torch.isfinite(p.grad).all(), n
            out[f"sketch.{n}"] = sketch(oriented(n, p.grad))
            if case == "C" and name == "qwen3_vl" and ("deepstack" in n or "pos_embed" in n or ".layers.0." in n):
                out[f"grad.{n}"] = p.grad
    if is_moe(name) and case == "E":
        out |= balance(model, prompt, given["completion"], pixels)
    tokens, margins = greedy(lambda tokens: logits_of(model, prompt + tokens, extend(positions, len(tokens)), pixels)[-1], GREEDY_TOKENS)
    print(f"{name} {case}: L={len(prompt)} loss={float(loss.detach()):.3f} min margin={min(margins):.4f} {tokens}")
    out["greedy"] = torch.tensor(tokens)
    return out, min(margins) > 1e-3 and not any(EOT <= t <= VID or t > ID["</answer>"] for t in tokens)


def write_cases():
    generator = torch.Generator().manual_seed(29)
    lines, cases = [], {}
    for case, (text, media, fps, limits) in CASES.items():
        lines.append(row_of(case, text, media, **limits, **(dict(fps=fps) if fps else {})))
        completion = torch.randint(0, 256, (8,), generator=generator).tolist()
        completion[5] = ID["<answer>"]
        cases[case] = dict(completion=completion, coefficients=torch.randn(8, generator=generator))
        save_tensors(ROOT / f"{case}.safetensors", dict(
            completion_ids=torch.tensor(completion), coefficients=cases[case]["coefficients"]
        ))
    (ROOT / "rows.jsonl").write_text("\n".join(lines) + "\n")
    for name, wanted in RESULTS.items():
        model = new_model(name)
        for case in wanted:
            out, decided = run_case(model, name, case, cases[case])
            assert decided, (name, case)
            save_tensors(ROOT / f"{case}.{name}.safetensors", out)


def check_processor():
    """Ids, grids and patch rows are what transformers' own processor makes. Its frames come at the size they are resized to:
    torchvision does not round as Pillow does."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(), eos_token="<|im_end|>", pad_token="<|endoftext|>",
        extra_special_tokens=dict(
            image_token="<|image_pad|>", video_token="<|video_pad|>", vision_start_token="<|vision_start|>",
            vision_end_token="<|vision_end|>",
        ),
    )
    processor = Qwen3VLProcessor(image_processor(), tokenizer, Qwen3VLVideoProcessor(), chat_template=TEMPLATE)
    for case, (text, media, fps, _) in CASES.items():
        at = iter(media)
        content = [
            {"type": p[1:-1]} if p in ("<image>", "<video>") and next(at, None) is not None else {"type": "text", "text": p}
            for p in pieces_of(text, media)
        ]
        prompt = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        images = [open_rgb(MEDIA / m) for m in media if isinstance(m, str)]
        videos, metadata = [], []
        for medium in media:
            if isinstance(medium, list):
                _, (_, h, w) = pixels_of(medium)
                frames = [np.array(open_rgb(MEDIA / f).resize((w * 16, h * 16), 3)) for f in medium]
                videos.append(np.stack(frames))
                metadata.append(VideoMetadata(
                    total_num_frames=len(medium), fps=fps or 2.0, frames_indices=list(range(len(medium)))
                ))
        kwargs = dict(images=images) if images else {}
        if videos:
            kwargs |= dict(videos=videos, videos_kwargs=dict(
                do_sample_frames=False, do_resize=False, video_metadata=metadata
            ))
        out = processor(text=[prompt], return_tensors="pt", **kwargs)
        assert out["input_ids"][0].tolist() == encode(render(text, media, fps)), case
        for key, value in inputs_of(media).items():
            got = out[key]
            assert torch.equal(got, value) if key.endswith("thw") else torch.allclose(got, value, atol=1e-6), (case, key)


def prepared_rows():
    """Prompts of the replay, with completions and advantages."""
    prepared = []
    for row in ROWS:
        media = ["shapes.png"] if "image" in row["media"] else [FRAMES] if "video" in row["media"] else []
        rewards = torch.tensor(row["rewards"], dtype=torch.float64)
        prepared.append(dict(
            row=row["id"], prompt=encode(render(row["question"], media, 2.0)), pixels=inputs_of(media),
            completions=[encode(c) for c in row["completions"]],
            advantages=((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist(),
        ))
    return prepared


def write_replay():
    """Three steps of GRPO by transformers' model and torch's optimizer."""
    logp = lambda model, item, completion, dtype: logp_of(model, item["prompt"], completion, item["pixels"])[1]
    three_steps("qwen3_vl", new_model("qwen3_vl"), prepared_rows(), logp, lambda n: n)


def main():
    ROOT.mkdir(parents=True, exist_ok=True)
    write_checkpoints()
    check_processor()
    write_cases()
    write_replay()


if __name__ == "__main__":
    main()
