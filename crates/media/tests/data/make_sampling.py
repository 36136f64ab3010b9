"""Writes sampling.json: what qwen-vl-utils 0.0.14, NumPy and torch make of many counts and sizes.

Run: python make_sampling.py   (needs numpy, torch, torchvision and qwen-vl-utils 0.0.14)
"""

import json
import random
from pathlib import Path

import numpy as np
import torch
from qwen_vl_utils import vision_process as q
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as processor_resize

random.seed(0)


def attempt(f):
    try:
        return f()
    except (ValueError, AssertionError, ZeroDivisionError):
        return None


resize = []
for i in range(160):
    h, w = int(2 ** random.uniform(0, 11.5)), int(2 ** random.uniform(0, 11.5))
    if i % 4 == 0:  # exact ties of round
        h, w = 14 * random.randrange(1, 60), 14 * random.randrange(1, 60)
    low = random.choice([3136, 100352, 784, 12544])
    high = max(low, random.choice([12845056, 401408, 602112, 50176, 21168]))
    utils = attempt(lambda: q.smart_resize(h, w, 28, low, high))
    if utils and min(utils) == 0:
        utils = [max(28, v) for v in utils]  # documented difference
    resize.append([h, w, low, high, attempt(lambda: processor_resize(h, w, 28, low, high)), utils])

qwen = []
for _ in range(150):
    total, fps = random.randrange(1, 700), random.choice([25.0, 10.0, 30000 / 1001, 2.0, 60.0])
    ele = {}
    if random.random() < 0.3:
        ele["nframes"] = random.randrange(1, 40)
    elif random.random() < 0.7:
        ele["fps"] = random.choice([1.0, 2.0, 0.5, 4.0, 0.0])
        if random.random() < 0.5:
            ele["min_frames"] = random.randrange(1, 12)
        if random.random() < 0.5:
            ele["max_frames"] = random.randrange(2, 70)
    if random.random() < 0.3:
        ele["video_start"] = round(random.uniform(-1, total / fps), 2)
    if random.random() < 0.3:
        ele["video_end"] = round(random.uniform(0, total / fps + 5), 2)

    def run():
        start, end, count = q.calculate_video_frame_range(ele, total, fps)
        n = q.smart_nframes(ele, total_frames=count, video_fps=fps)
        return [torch.linspace(start, end, n).round().long().tolist(), n / max(count, 1e-6) * fps]

    qwen.append([total, fps, ele, attempt(run)])


def pixels(h, w, n, **ele):
    """The size rule at the end of fetch_video."""
    f = 28
    low = ele.get("min_pixels", q.VIDEO_MIN_TOKEN_NUM * f * f)
    total = ele.get("total_pixels", q.MODEL_SEQ_LEN * f * f * 0.9)
    high = max(min(q.VIDEO_MAX_TOKEN_NUM * f * f, total / n * q.FRAME_FACTOR), int(low * 1.05))
    high = min(ele.get("max_pixels", high), high)
    return q.smart_resize(h, w, factor=f, min_pixels=low, max_pixels=high)


budget = []
for _ in range(80):
    h, w, n = random.randrange(40, 2200), random.randrange(40, 2200), random.choice([2, 4, 8, 31, 300, 768])
    ele = {}
    if random.random() < 0.5:
        ele["min_pixels"] = random.choice([3136, 12544, 100352])
    if random.random() < 0.5:
        ele["max_pixels"] = random.choice([100352, 200704, 602112, 2000000])
    if random.random() < 0.5:
        ele["total_pixels"] = random.choice([20480 * 28 * 28, 16384 * 28 * 28, 1000000])
    budget.append([h, w, n, ele, pixels(h, w, n, **ele)])

base = []
for _ in range(60):
    total, fps = random.randrange(1, 900), random.choice([10.0, 25.0, 30000 / 1001])
    interval, low, high = random.choice([2.0, 0.5, 1.0]), random.randrange(1, 6), random.randrange(6, 20)
    n = min(max(round(total / fps / interval), low), high)
    indices = np.unique(np.linspace(0, total - 1, n, dtype=int))
    base.append([total, fps, interval, low, high, indices.tolist(), len(indices) / (total / fps)])

middle = []
for total in [1, 5, 8, 9, 16, 100, 251, 1234]:
    share = float(total - 1) / 8
    ids = [np.round((share * i + share * (i + 1)) / 2 + 1e-6) for i in range(8)]
    middle.append([total, [int(i) for i in ids]])

rows = dict(resize=resize, qwen=qwen, budget=budget, base=base, middle=middle)
text = "{\n" + ",\n".join(f'"{k}": [\n' + ",\n".join(json.dumps(r) for r in v) + "\n]" for k, v in rows.items()) + "\n}\n"
(Path(__file__).parent / "sampling.json").write_text(text)
