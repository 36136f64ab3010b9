"""Tiny Qwen2-VL / Qwen2.5-VL checkpoints, media, prompts and the position rule shared by all golden scripts.

Every number written by these scripts comes from transformers on CPU in float32 with eager attention.
"""

import json
import math
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)

OUT = Path(__file__).resolve().parents[2] / "crates/models/tests/golden"
CHECKPOINTS = OUT / "checkpoints"
MEDIA = OUT / "media"

FRAMES = [f"frames/{t:04}.png" for t in range(8)]

VOCAB = 320
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 16
# Vocabulary: 256 bytes, NUM_MERGES merges, then these; the rest of the 320 rows is unused, as in the published models.
NUM_MERGES = 40
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]
ADDED = ["<think>", "</think>", "<answer>", "</answer>"]
ID = {t: 256 + NUM_MERGES + i for i, t in enumerate(SPECIAL + ADDED)}
EOT, IM_END = ID["<|endoftext|>"], ID["<|im_end|>"]
VS, VE, IMG, VID = (ID[f"<|{n}|>"] for n in ("vision_start", "vision_end", "image_pad", "video_pad"))

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
# The published layout leaves `lm_head.weight` out of a tied checkpoint.
NAMES = tuple(f"{f}_{t}" for f in FAMILIES for t in ("tied", "untied"))
# Chosen so that every greedy step of every case is decided clearly and no control token appears.
SEEDS = dict(zip(NAMES, (41, 21, 47, 20)))


def family_of(name: str) -> str:
    return "qwen2_5_vl" if name.startswith("qwen2_5") else "qwen2_vl"


def hub_config(name: str) -> dict:
    """config.json in the flat form of the hub, with the hub's own superfluous fields."""
    family, tied = family_of(name), not name.endswith("untied")
    shared = dict(
        attention_dropout=0.0, bos_token_id=EOT, eos_token_id=IM_END, vision_start_token_id=VS, vision_end_token_id=VE,
        vision_token_id=ID["<|vision_pad|>"], image_token_id=IMG, video_token_id=VID, hidden_act="silu",
        hidden_size=64, initializer_range=0.02, intermediate_size=80, max_position_embeddings=512,
        max_window_layers=2, num_attention_heads=4, num_hidden_layers=2, num_key_value_heads=2, rms_norm_eps=1e-6,
        rope_theta=1000000.0, sliding_window=32768, tie_word_embeddings=tied, torch_dtype="float32",
        transformers_version="4.41.2", use_cache=True, use_sliding_window=False, vocab_size=VOCAB,
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
    )
    if family == "qwen2_vl":
        return dict(
            architectures=["Qwen2VLForConditionalGeneration"], model_type="qwen2_vl", **shared,
            vision_config=dict(
                depth=2, embed_dim=16, hidden_size=64, num_heads=2, mlp_ratio=4, in_chans=3, patch_size=14,
                spatial_merge_size=2, spatial_patch_size=14, temporal_patch_size=2,
            ),
        )
    return dict(
        architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl", **shared,
        vision_config=dict(
            depth=4, hidden_act="silu", hidden_size=16, intermediate_size=24, num_heads=2, in_chans=3,
            out_hidden_size=64, patch_size=14, spatial_merge_size=2, spatial_patch_size=14, window_size=56,
            fullatt_block_indexes=[1, 3], tokens_per_second=2, temporal_patch_size=2,
        ),
    )


def model_classes(family: str):
    if family == "qwen2_vl":
        return Qwen2VLConfig, Qwen2VLForConditionalGeneration
    return Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration


def published(name: str) -> str:
    """In-memory parameter name of transformers 5 -> name in published files."""
    if name.startswith("model.visual."):
        return name.removeprefix("model.")
    return name.replace("model.language_model.", "model.", 1)


def parameters(model) -> dict:
    """Published name -> parameter; a tied head appears once, as the embedding."""
    return {published(n): p for n, p in model.named_parameters()}


def is_loud(name: str) -> bool:
    """Strong decoder branches, or a tied head only repeats the last token."""
    return name.endswith(("o_proj.weight", "down_proj.weight"))


def scale(name: str, p) -> float:
    """A calm tower under a loud merger, so that media change the answer while float32 stays well inside the tolerances."""
    gain = (1.5 if "merger" in name else 0.8) if "visual" in name else (2.5 if is_loud(name) else 1.2)
    return gain / math.sqrt(inputs(name, p))


def inputs(name: str, p) -> int:
    """Inputs of a layer, or of one expert."""
    return p.shape[-1] if ".experts." in name else p[0].numel()


def oriented(name: str, tensor):
    """A tensor of transformers 5 in the program's form: weights of experts are [e, inputs, outputs]."""
    return tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor


def randomise(named, seed: int, scale=scale):
    """Random weights with a useful spread: no bias is 0, no norm weight is 1, logits differ by more than rounding. `scale` is that
    of a weight with inputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for n, p in named:
            noise = torch.randn(p.shape, generator=generator)
            if n.endswith("bias"):
                p.copy_(0.1 * noise)
            elif p.dim() == 1:
                p.copy_(1.0 + 0.2 * noise)
            elif "embed_tokens" in n or "lm_head" in n:
                p.copy_(0.35 * noise)
            else:
                p.copy_(noise * scale(n, p))


def new_model(name: str):
    config_class, model_class = model_classes(family_of(name))
    raw = {k: v for k, v in hub_config(name).items() if k not in ("architectures", "model_type", "transformers_version")}
    torch.manual_seed(0)
    model = model_class._from_config(config_class(**raw), attn_implementation="eager", dtype=torch.float32).eval()
    randomise(model.named_parameters(), SEEDS[name])
    return model


def load_model(name: str, directory: Path | None = None):
    _, model_class = model_classes(family_of(name))
    return model_class.from_pretrained(
        directory or CHECKPOINTS / name, attn_implementation="eager", dtype=torch.float32
    ).eval()


def save_tensors(path: Path, tensors: dict, **metadata: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.detach().clone().contiguous() for k, v in tensors.items()}, path, metadata=metadata or None)
    path.chmod(0o644)


def greedy(logits, count: int, stop: int | None = None):
    """Greedy tokens, and the lead of each over the next best. `logits` returns those that follow some tokens."""
    tokens, margins = [], []
    with torch.no_grad():
        for _ in range(count):
            last = logits(tokens)
            top = last.topk(2).values
            margins.append(float(top[0] - top[1]))
            tokens.append(int(last.argmax()))
            if tokens[-1] == stop:
                break
    return tokens, margins


def row_of(case: str, text: str, media, **options) -> str:
    """A row with images, and with videos as lists of frames, in JSON."""
    images = [f"media/{m}" for m in media if isinstance(m, str)]
    videos = [[f"media/{f}" for f in m] for m in media if isinstance(m, list)]
    row = dict(id=case) | (dict(image=images) if images else {}) | (dict(video=videos) if videos else {}) | options
    return json.dumps(row | dict(conversations=[{"from": "human", "value": text}]), ensure_ascii=False)


def write_json(path: Path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


# ---------------------------------------------------------------------------------------------------------- media


def make_media():
    """Small PNGs, and one clip both as a GIF and as a directory of frames (same pixels)."""
    frames_dir = MEDIA / "frames"
    frames_dir.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    Image.fromarray(rng.integers(0, 256, (60, 90, 3), dtype=np.uint8)).save(MEDIA / "noise.png")
    shapes = Image.new("RGB", (70, 101), (230, 230, 210))
    draw = ImageDraw.Draw(shapes)
    draw.rectangle([8, 10, 40, 44], fill=(200, 30, 30))
    draw.ellipse([30, 50, 62, 90], fill=(30, 60, 200))
    draw.line([0, 100, 69, 60], fill=(10, 120, 40), width=3)
    shapes.save(MEDIA / "shapes.png")
    rgba = np.zeros((56, 56, 4), dtype=np.uint8)
    rgba[10:40, 12:50] = (20, 160, 90, 255)
    rgba[30:50, 5:30] = (240, 200, 10, 128)
    Image.fromarray(rgba).save(MEDIA / "alpha.png")
    frames = []
    for t in range(8):
        frame = Image.new("RGB", (56, 56), (16, 16, 48))
        draw = ImageDraw.Draw(frame)
        draw.ellipse([4 + 4 * t, 8 + 2 * t, 20 + 4 * t, 24 + 2 * t], fill=(255, 255, 0))
        draw.rectangle([40 - 3 * t, 40, 50 - 3 * t, 50], fill=(0, 200, 120))
        frame.save(frames_dir / f"{t:04}.png")
        frames.append(frame)
    palette = [f.quantize(8) for f in frames]
    palette[0].save(MEDIA / "clip.gif", save_all=True, append_images=palette[1:], duration=500, loop=0, disposal=1)
    with Image.open(MEDIA / "clip.gif") as gif:
        assert gif.n_frames == 8
        for t, frame in enumerate(frames):
            gif.seek(t)
            assert np.array_equal(np.asarray(gif.convert("RGB")), np.asarray(frame)), t


def image_processor():
    return Qwen2VLImageProcessorPil(min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)


def open_rgb(path: Path) -> Image.Image:
    """RGBA is pasted on white, everything else converted."""
    image = Image.open(path)
    if image.mode == "RGBA":
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.split()[3])
        return white
    return image.convert("RGB")


def process_images(paths):
    out = image_processor()(images=[open_rgb(MEDIA / p) for p in paths], return_tensors="pt")
    return out["pixel_values"].float(), out["image_grid_thw"]


def process_frames(paths):
    """Frames -> patch rows: each frame through the image processor, consecutive frames share a temporal patch."""
    pixels, grids = process_images(paths)
    assert len(paths) % 2 == 0 and (grids == grids[0]).all()
    rows, (_, h, w) = h_times_w(grids), grids[0].tolist()
    single = pixels.view(len(paths), rows, 3, 2, 14 * 14)[:, :, :, 0]
    video = torch.stack([single[0::2], single[1::2]], dim=3)
    return video.reshape(len(paths) // 2 * rows, 3 * 2 * 14 * 14), torch.tensor([[len(paths) // 2, h, w]])


def h_times_w(grids) -> int:
    return int(grids[0, 1] * grids[0, 2])


# ---------------------------------------------------------------------------------------------------------- prompts


def position_ids(ids, family, image_grids=(), video_grids=(), second_per_grid=(), tokens_per_second=2):
    """[3, L] by the rule the models were trained with: after a medium, go on at (largest position of any axis) + 1."""
    out, start, images, videos = [], 0, iter(image_grids), iter(zip(video_grids, second_per_grid))
    i = 0
    while i < len(ids):
        if ids[i] not in (IMG, VID):
            out.append((start, start, start))
            start, i = start + 1, i + 1
            continue
        if ids[i] == IMG:
            (t, h, w), seconds = next(images), 0.0
        else:
            (t, h, w), seconds = next(videos)
        h, w = int(h) // 2, int(w) // 2
        for k in range(int(t)):
            if family == "qwen2_vl":
                step = k
            else:
                # In float32, like transformers: 1/3 s and similar values must not land one below.
                step = math.floor(np.float32(k) * (np.float32(tokens_per_second) * np.float32(seconds)))
            out += [(start + step, start + y, start + x) for y in range(h) for x in range(w)]
        i += int(t) * h * w
        start = max(max(p) for p in out) + 1
    assert len(out) == len(ids)
    return torch.tensor(out).T.contiguous()


def tf5_position_ids(model, ids, image_grids=None, video_grids=None, second_per_grid=None):
    """transformers' own rule; differs from `position_ids` after videos longer than their frames are wide."""
    ids = torch.tensor([ids])
    kinds = torch.where(ids == IMG, 1, torch.where(ids == VID, 2, 0)).int()
    kwargs = {}
    if second_per_grid is not None and "Qwen2_5" in type(model).__name__:
        kwargs["second_per_grid_ts"] = torch.tensor(second_per_grid)
    positions, _ = model.model.get_rope_index(
        ids, mm_token_type_ids=kinds, image_grid_thw=image_grids, video_grid_thw=video_grids, **kwargs
    )
    return positions[:, 0]


def extend(positions, n):
    """Positions of `n` completion tokens: largest + 1 + t on all axes."""
    tail = positions.max() + 1 + torch.arange(n)
    return torch.cat([positions, tail.expand(3, n)], dim=1)


# ---------------------------------------------------------------------------------------------------------- gradients

NUM_PROJECTIONS = 8


def projection_signs(n: int) -> torch.Tensor:
    """[8, n] of +1 / -1: bit 16 of a small integer hash of (flat index, projection)."""
    k = np.arange(n, dtype=np.uint64)
    rows = []
    for j in range(NUM_PROJECTIONS):
        h = (k * np.uint64(0x9E3779B1) + np.uint64(j * 0x85EBCA77)) & np.uint64(0xFFFFFFFF)
        h ^= h >> np.uint64(15)
        h = (h * np.uint64(0x2C1B3C6D)) & np.uint64(0xFFFFFFFF)
        h ^= h >> np.uint64(12)
        rows.append(1.0 - 2.0 * ((h >> np.uint64(16)) & np.uint64(1)).astype(np.float64))
    return torch.from_numpy(np.stack(rows))


def sketch(tensor) -> torch.Tensor:
    """[9]: the 2-norm of a tensor and 8 sums of its elements under fixed signs, in f64, stored as f32.

    A difference D moves each sum by about |D|, so nine numbers stand for the whole tensor at a tolerance relative to
    its norm.
    """
    flat = tensor.detach().double().flatten()
    return torch.cat([flat.norm().reshape(1), projection_signs(flat.numel()) @ flat]).float()


def gradients(model, full: bool) -> dict:
    """Gradients under published names: `sketch.<name>` always, `grad.<name>` when `full`. None = nothing used it."""
    out = {}
    for n, p in parameters(model).items():
        if p.grad is None:
            continue
        assert torch.isfinite(p.grad).all(), n
        out[f"sketch.{n}"] = sketch(oriented(n, p.grad))
        if full:
            out[f"grad.{n}"] = p.grad
    return out
