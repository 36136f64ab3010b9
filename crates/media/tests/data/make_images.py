"""Writes the picture goldens of this folder: input files, and what Pillow 13.0 and the PIL-backend Qwen2-VL processors
of transformers 5.23 make of them.

Large results are stored as a SHA-256 of their little-endian bytes; Rust compares the hash of its own bytes, which is exact equality.
Run: python make_images.py   (needs numpy, pillow, torch, torchvision, transformers)
"""

import hashlib
import io
import json
import random
from pathlib import Path

import numpy as np
import PIL
import torch
from PIL import Image
from transformers.image_transforms import convert_to_rgb
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

HERE = Path(__file__).parent
assert PIL.__version__.startswith("13.0."), f"Pillow {PIL.__version__}: the order of resize's passes is that of 13.0"


def noise(seed, *shape):
    """Bytes of a 64-bit LCG (Knuth's MMIX constants), top byte of each state; Rust makes the same."""
    n = int(np.prod(shape))
    state, out = seed, np.empty(n, np.uint8)
    for i in range(n):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out[i] = state >> 56
    return out.reshape(shape)


def sha(a):
    return hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()


golden = {"resize": [], "files": [], "patches": []}

# Pillow resize. (seed, in w, in h, out w, out h)
for seed, w, h, w2, h2 in [
    (1, 150, 90, 140, 84), (2, 37, 53, 112, 168), (3, 333, 101, 56, 28), (4, 64, 48, 64, 84), (5, 64, 48, 84, 48),
    (6, 1, 7, 28, 28), (7, 640, 3, 13, 2),
]:
    image = Image.fromarray(noise(seed, h, w, 3))
    out = np.asarray(image.resize((w2, h2), Image.Resampling.BICUBIC))
    row = dict(seed=seed, size=[w, h], out=[w2, h2], sha256=sha(out))
    if out.size <= 900:
        row["pixels"] = out.ravel().tolist()
    golden["resize"].append(row)

# LANCZOS: pictures that shrink, grow and do both, in either order of the passes.
golden["resize_lanczos"] = []
for seed, w, h, w2, h2 in [
    (21, 150, 90, 140, 84), (22, 37, 53, 112, 168), (23, 333, 101, 56, 28), (24, 64, 48, 64, 84), (25, 64, 48, 84, 48),
    (26, 1, 7, 28, 28), (27, 640, 3, 13, 2), (28, 90, 60, 1024, 682), (29, 1024, 682, 128, 128), (30, 70, 300, 69, 31),
    (31, 5, 5, 3, 9), (32, 700, 500, 384, 384),
]:
    image = Image.fromarray(noise(seed, h, w, 3))
    out = np.asarray(image.resize((w2, h2), Image.Resampling.LANCZOS))
    golden["resize_lanczos"].append(dict(seed=seed, size=[w, h], out=[w2, h2], sha256=sha(out)))

# The order of the passes: random sizes, of which only those are kept where the orders give different pixels. One pass after
# the other is two calls of resize that change one side each.
golden["resize_order"] = []
sizes, kept = random.Random(0), {True: 0, False: 0}
while min(kept.values()) < 30:
    w, h, w2, h2 = (sizes.randrange(1, 90) for _ in range(4))
    seed = 100 + len(golden["resize_order"])
    image = Image.fromarray(noise(seed, h, w, 3))
    resize = lambda picture, size: np.asarray(picture.resize(size, Image.Resampling.BICUBIC))
    out = resize(image, (w2, h2))
    vertical_first, horizontal_first = (
        np.array_equal(out, resize(image.resize(size, Image.Resampling.BICUBIC), (w2, h2))) for size in [(w, h2), (w2, h)]
    )
    if vertical_first == horizontal_first or kept[vertical_first] >= 40:
        continue
    kept[vertical_first] += 1
    row = dict(seed=seed, size=[w, h], out=[w2, h2], vertical_first=vertical_first, sha256=sha(out))
    golden["resize_order"].append(row)

# Files: every mode the readers meet; expected pixels are convert_to_rgb's (transparency on white).
rng = np.random.default_rng(0)
small = rng.integers(0, 256, (9, 13, 4), dtype=np.uint8)
small[:3, :, 3] = 255
small[3:5, :, 3] = 0
rgba = Image.fromarray(small)
rgb = Image.fromarray(small[..., :3].copy())
palette = rgb.quantize(16)
g16 = Image.fromarray((np.arange(9 * 13).reshape(9, 13) * 5).astype(np.uint16))
exif = Image.Exif()
exif[0x0112] = 6
frames = [Image.fromarray(rng.integers(0, 256, (9, 13, 3), dtype=np.uint8)) for _ in range(3)]
bayer = rgb.convert("L").point(lambda v: 255 * (v > 120)).convert("1", dither=Image.Dither.NONE)


def png16(color_type, channels):
    """A 16-bit PNG, which Pillow cannot write for colour."""
    import struct, zlib
    raw = rng.integers(0, 65536, (9, 13, channels)).astype(">u2")
    body = b"".join(b"\0" + raw[y].tobytes() for y in range(9))
    chunk = lambda t, d: struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 13, 9, 16, color_type, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b""))


files = {
    "rgba.png": (rgba, {}),
    "la.png": (rgba.convert("LA"), {}),
    "grey.png": (rgb.convert("L"), {}),
    "bit.png": (bayer, {}),
    "palette.png": (palette, {}),
    "palette_transparent.png": (palette, dict(transparency=3)),
    "rgb_transparent.png": (rgb, dict(transparency=tuple(int(v) for v in small[4, 4, :3]))),
    "grey16.png": (g16, {}),
    "exif.png": (rgb, dict(exif=exif)),
    "plain.bmp": (rgb, {}),
    "plain.tiff": (rgb, {}),
    "rgba_lossless.webp": (rgba, dict(lossless=True, exact=True)),
    "animated.gif": (frames[0], dict(save_all=True, append_images=frames[1:], duration=[50, 70, 80], loop=0)),
    "animated_lossless.webp": (frames[0], dict(save_all=True, append_images=frames[1:], duration=[50, 70, 80], lossless=True)),
}
for name, (image, options) in files.items():
    image.save(HERE / name, **options)
for name, kind, channels in [("rgb16.png", 2, 3), ("la16.png", 4, 2), ("rgba16.png", 6, 4)]:
    (HERE / name).write_bytes(png16(kind, channels))
# Smooth content, as photographs: the decoders' difference is stated for it.
y, x = np.mgrid[0:48, 0:64]
photo = np.stack([128 + 100 * np.sin(x / 9 + y / 17), 128 + 100 * np.cos(y / 11), (x * 3 + y * 2) % 256 * 0 + x * 3.5], -1)
Image.fromarray(photo.clip(0, 255).astype(np.uint8)).save(HERE / "photo_444.jpg", quality=90, subsampling=0)
Image.fromarray(photo.clip(0, 255).astype(np.uint8)).save(HERE / "photo_420.jpg", quality=90)
Image.fromarray(photo.clip(0, 255).astype(np.uint8)).save(HERE / "photo.webp", quality=90)
for path in sorted(p for p in HERE.iterdir() if p.suffix in {".png", ".bmp", ".tiff", ".webp", ".gif", ".jpg"}):
    image = Image.open(path)
    pixels = convert_to_rgb(image, return_numpy=True)
    row = dict(name=path.name, size=list(image.size), sha256=sha(pixels))
    if path.name.startswith("photo"):
        (HERE / (path.name + ".rgb")).write_bytes(pixels.tobytes())
    golden["files"].append(row)

# Processors. Inputs are noise pictures of a seed, by channels (1 grey, 3 RGB, 4 RGBA), saved as PNG in Rust and here.
def patches(seed, h, w, channels, **options):
    pixels = noise(seed, h, w, channels)
    image = Image.fromarray(pixels if channels > 1 else pixels[..., 0])
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    image = Image.open(buffer)
    out = Qwen2VLImageProcessorPil(**options)(images=[image], return_tensors="np")
    values = out["pixel_values"].astype("<f4")
    return dict(seed=seed, h=h, w=w, channels=channels, options=options, grid=out["image_grid_thw"][0].tolist(),
                sha256=sha(values), head=[float(v) for v in values[0, :4]], tail=[float(v) for v in values[-1, -4:]])


hub = {"min_pixels": 3136, "max_pixels": 12845056}
for row in [
    (11, 90, 150, 3, hub), (12, 27, 200, 3, hub), (13, 1001, 333, 3, hub), (14, 90, 150, 4, hub), (15, 64, 70, 1, hub),
    (16, 10, 40, 3, hub), (17, 300, 400, 3, {"size": {"shortest_edge": 3136, "longest_edge": 50176}}),
    (18, 56, 84, 3, {"do_resize": False}), (19, 56, 56, 3, {"do_normalize": False}), (20, 56, 56, 3, {"do_rescale": False}),
    (21, 96, 64, 3, {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}),
]:
    golden["patches"].append(patches(*row[:4], **row[4]))

# Animations, frame by frame.
golden["animations"] = []
for name in ["animated.gif", "animated_lossless.webp"]:
    image = Image.open(HERE / name)
    rows = []
    for i in range(image.n_frames):
        image.seek(i)
        rows.append(sha(convert_to_rgb(image, return_numpy=True)))
    golden["animations"].append(dict(name=name, frames=rows))

# The video processor: exact where no resizing is needed; otherwise its levels, to compare with a tolerance.
def video(seed, t, h, w, **options):
    frames = torch.from_numpy(noise(seed, t, h, w, 3)).permute(0, 3, 1, 2)
    processor = Qwen2VLVideoProcessor(cap_pixels_per_frame=False, **options)
    out = processor(videos=[frames], return_tensors="pt")
    rows = out["pixel_values_videos"].numpy().astype("<f4")
    row = dict(seed=seed, t=t, h=h, w=w, options=options, grid=out["video_grid_thw"][0].tolist(), sha256=sha(rows))
    if h % 28 or w % 28:
        per_channel = rows.reshape(len(rows), 3, -1)
        mean, std = (np.array(v)[None, :, None] for v in (processor.image_mean, processor.image_std))
        levels = np.rint((per_channel * std + mean) * 255)
        (HERE / "video_levels.bin").write_bytes(levels.astype(np.uint8).tobytes())
    return row


golden["videos"] = [
    video(31, 5, 56, 84, min_pixels=784, max_pixels=12845056),
    video(32, 3, 50, 66, min_pixels=784, max_pixels=3200),
]

(HERE / "images.json").write_text(json.dumps(golden, indent=1))
