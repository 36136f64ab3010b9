"""COCO average precision by pycocotools 2.0.11, one image, score 1 for every box, as VLM-R1 calls it.

Usage: python coco_goldens.py > coco_goldens.json
"""

import contextlib
import io
import json
import random

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

LABELS = ["cat", "dog", "car"]


def stats(predicted, gold):
    ids = {}
    annotations = []
    for index, box in enumerate(gold):
        category = ids.setdefault(box["label"], len(ids))
        x1, y1, x2, y2 = box["bbox_2d"]
        annotations.append(
            {"id": index + 1, "image_id": 0, "category_id": category, "iscrowd": 0,
             "bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1)}
        )
    results = []
    for box in predicted:
        if box["label"] in ids:
            x1, y1, x2, y2 = box["bbox_2d"]
            results.append(
                {"image_id": 0, "category_id": ids[box["label"]], "bbox": [x1, y1, x2 - x1, y2 - y1], "score": 1.0}
            )
    if not results:
        return 0.0, 0.0
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "info": {},
            "images": [{"id": 0, "width": 2048, "height": 2048}],
            "categories": [{"id": i, "name": name} for name, i in ids.items()],
            "annotations": annotations,
        }
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0]), float(evaluation.stats[1])


def box(rng, label=None):
    x, y = rng.randrange(0, 80), rng.randrange(0, 80)
    return {"bbox_2d": [x, y, x + rng.randrange(5, 40), y + rng.randrange(5, 40)], "label": label or rng.choice(LABELS)}


def near(rng, other):
    moved = [corner + rng.randrange(-3, 4) for corner in other["bbox_2d"]]
    if moved[2] <= moved[0] or moved[3] <= moved[1]:
        moved = other["bbox_2d"]
    return {"bbox_2d": moved, "label": other["label"]}


def main():
    rng = random.Random(5)
    cases = []
    for index in range(40):
        gold = [box(rng) for _ in range(rng.randrange(1, 7))]
        predicted = [near(rng, g) for g in gold if rng.random() < 0.8]
        predicted += [box(rng) for _ in range(rng.randrange(0, 3))]
        if index % 5 == 0 and predicted:
            predicted.append(dict(predicted[0]))
        if index % 7 == 0:
            predicted.append(box(rng, "bird"))
        rng.shuffle(predicted)
        if not predicted:
            predicted = [box(rng)]
        cases.append((predicted, gold))
    crowd = [box(rng, "cat") for _ in range(57)]
    cases.append((crowd[:33], crowd))
    cases.append(([box(rng, "cat") for _ in range(80)] + crowd, crowd))
    out = []
    for predicted, gold in cases:
        ap, ap50 = stats(predicted, gold)
        length = min(1.0, len(gold) / len(predicted))
        out.append({"predicted": predicted, "gold": gold, "od_ap": ap, "od_ap50": ap50, "odLength": ap * length})
    print("[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in out) + "\n]")


main()
