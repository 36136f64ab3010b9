"""Writes video_processor.json: which frames `Qwen3VLVideoProcessor` of transformers takes, and how large they become.

Run: python make_video_processor.py   (needs transformers, torch and torchvision)
"""

import json
import random
from pathlib import Path

from transformers.models.glm4v.video_processing_glm4v import smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

random.seed(0)
processor = Qwen3VLVideoProcessor()

frames = []
for _ in range(120):
    total, fps = random.randrange(1, 2000), random.choice([25.0, 10.0, 30000 / 1001, 2.0, 60.0])
    rate = random.choice([2.0, 2.0, 1.0, 0.5, 3.7])
    processor.min_frames, processor.max_frames = random.choice([(4, 768), (4, 8), (1, 5), (6, 31)])
    metadata = VideoMetadata(total_num_frames=total, fps=fps)
    indices = processor.sample_frames(metadata, fps=rate)
    frames.append([total, fps, rate, processor.min_frames, processor.max_frames, indices.tolist()])

sizes = []
for i in range(160):
    h, w, n = int(2 ** random.uniform(2, 11.5)), int(2 ** random.uniform(2, 11.5)), random.choice([1, 2, 3, 4, 5, 8, 31, 300, 768])
    if i % 4 == 0:  # exact ties of round
        h, w = 16 * random.randrange(1, 60), 16 * random.randrange(1, 60)
    low, high = random.choice([(4096, 25165824), (4096, 25165824), (131072, 786432), (4096, 1 << 20), (1 << 22, 1 << 23)])
    try:
        size = smart_resize(n, h, w, temporal_factor=2, factor=32, min_pixels=low, max_pixels=high)
    except ValueError:
        size = None
    sizes.append([n, h, w, low, high, size])

rows = dict(frames=frames, sizes=sizes)
text = "{\n" + ",\n".join(f'"{k}": [\n' + ",\n".join(json.dumps(r) for r in v) + "\n]" for k, v in rows.items()) + "\n}\n"
(Path(__file__).parent / "video_processor.json").write_text(text)
