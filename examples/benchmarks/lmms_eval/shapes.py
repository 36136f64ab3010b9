"""Functions of the task `shapes`: what the model sees, and whether it is right."""

import re

from PIL import Image

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)


def pictures(row):
    with Image.open(row["image"]) as picture:
        return [picture.convert("RGB")]


def question(row):
    return row["question"]


def scores(row, results):
    said = ANSWER.search(results[0])
    return {"accuracy": float(bool(said) and said[1].strip() == row["answer"])}
