"""A small dataset in the schema of ViVQA-X: drawn pictures with COCO file names, Vietnamese questions, three explanations.

    python examples/vivqa-x/make_vivqa_x.py runs/vivqa-data

Needs pillow, no network. Writes ViVQA-X_{train,val}.json, train2014/ and val2014/. No picture is in both splits.
"""

import hashlib
import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

SIZES = {"train": 1200, "val": 300}
COLOURS = {"đỏ": (214, 40, 40), "xanh lá": (44, 160, 68), "xanh dương": (40, 80, 210), "vàng": (240, 200, 30)}
SHAPES = {"hình vuông": "rectangle", "hình tròn": "ellipse"}
NUMBERS = {1: "một", 2: "hai", 3: "ba"}
# Names of the types of questions and answers in VQA v2.
KINDS = {"colour": ("what color is the", "other"), "count": ("how many", "number"), "yes_no": ("is the", "yes/no")}


def draw(rng):
    """A picture with one to three equal shapes, and what is on it."""
    colour, shape, count = rng.choice(list(COLOURS)), rng.choice(list(SHAPES)), rng.randint(1, 3)
    image = Image.new("RGB", (56, 56), tuple(rng.randint(225, 255) for _ in range(3)))
    places = rng.sample([(2, 2), (30, 2), (2, 30), (30, 30)], count)
    for x, y in places:
        x, y, size = x + rng.randint(0, 3), y + rng.randint(0, 3), rng.randint(17, 21)
        getattr(ImageDraw.Draw(image), SHAPES[shape])((x, y, x + size, y + size), fill=COLOURS[colour])
    return image, colour, shape, count


def ask(rng, colour, shape, count):
    """The kind of a question, its text, its answer and three explanations."""
    number = NUMBERS[count]
    kind = rng.choice(list(KINDS))
    if kind == "colour":
        return kind, f"{shape} màu gì?", colour, [
            f"{shape} trong ảnh có màu {colour}",
            f"vì {shape} được tô màu {colour}",
            f"ảnh có {shape} màu {colour}",
        ]
    if kind == "count":
        return kind, f"có bao nhiêu {shape}?", number, [
            f"trong ảnh có {number} {shape}",
            f"đếm được {number} {shape} trong ảnh",
            f"có {number} {shape} màu {colour}",
        ]
    asked = rng.choice(list(COLOURS))
    asked = asked if rng.random() < 0.5 else colour
    word = "có" if asked == colour else "không"
    return kind, f"{shape} có phải màu {asked} không?", word, [
        f"{shape} có màu {colour}",
        f"vì màu của {shape} là {colour}",
        f"{shape} trong ảnh là màu {colour}",
    ]


def main():
    out, rng, seen, number = Path(sys.argv[1]), random.Random(1), set(), 0
    for split, size in SIZES.items():
        folder = out / f"{split}2014"
        folder.mkdir(parents=True, exist_ok=True)
        items = []
        while len(items) < size:
            image, colour, shape, count = draw(rng)
            digest = hashlib.sha256(image.tobytes()).digest()
            if digest in seen:
                continue
            seen.add(digest)
            number += 1
            name = f"COCO_{split}2014_{number:012d}.jpg"
            image.save(folder / name, quality=95)
            kind, question, answer, explanation = ask(rng, colour, shape, count)
            items.append(
                {
                    "question": question,
                    "image_id": str(number),
                    "image_name": name,
                    "explanation": explanation,
                    "answer": answer,
                    "question_id": f"{number}000",
                    "question_type": KINDS[kind][0],
                    "answer_type": KINDS[kind][1],
                }
            )
        text = json.dumps(items, ensure_ascii=False, indent=1)
        (out / f"ViVQA-X_{split}.json").write_text(text, encoding="utf-8")
        print(f"{split}: {len(items)} items")


if __name__ == "__main__":
    main()
