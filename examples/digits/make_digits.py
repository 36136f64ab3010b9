"""Handwritten digits as questions: the 1,797 scans that the package scikit-learn carries, as PNG files and JSONL rows.

    python examples/digits/make_digits.py runs/digits-data

Needs scikit-learn and pillow, no network. The scans (8 x 8, 17 greys; UCI "Optical Recognition of Handwritten Digits",
test part) are enlarged to 56 x 56, which a Qwen2.5-VL model reads as four tokens. No scan is in two files.
"""

import hashlib
import json
import random
import sys
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

SIZES = {"sft": 600, "train": 797, "eval": 400}
QUESTION = "<image>\nWhich digit is it?"


def main():
    out = Path(sys.argv[1])
    (out / "images").mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    scans = {}
    for pixels, digit in zip(digits.images, digits.target):
        image = Image.fromarray((pixels * 255 / 16).round().astype("uint8")).resize((56, 56), Image.Resampling.BICUBIC)
        image = image.convert("RGB")
        digest = hashlib.sha256(image.tobytes()).hexdigest()[:16]
        scans[digest] = (image, int(digit))
    # All scans differ; keyed by content, a repeated one would be missed here.
    order = sorted(scans)
    assert len(order) == sum(SIZES.values()), len(order)
    random.Random(1).shuffle(order)
    for split, size in SIZES.items():
        chosen, order = order[:size], order[size:]
        with open(out / f"{split}.jsonl", "w") as file:
            for digest in chosen:
                image, digit = scans[digest]
                image.save(out / "images" / f"{digest}.png")
                file.write(json.dumps({
                    "id": digest,
                    "image": f"images/{digest}.png",
                    "conversations": [
                        {"from": "human", "value": QUESTION},
                        {"from": "gpt", "value": f"<think>{digit}</think><answer>{digit}</answer>"},
                    ],
                    "solution": f"<answer>{digit}</answer>",
                    "type": str(digit),
                }) + "\n")


if __name__ == "__main__":
    main()
