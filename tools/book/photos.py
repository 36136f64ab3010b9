#!/usr/bin/env python3
"""Makes a folder of photos and a table of labels, as a phone and a spreadsheet leave them: `photos.py DATA [--count N]`.

DATA is the folder `data` of `omnigrpo demo`. Its pictures of one shape become JPEG files of a phone's size below `photos`, every fourth
one stored sideways with an EXIF mark, and `labels.csv` has their file names and colours. Two photos are spoiled on purpose: one file
is cut, and one row names a file that does not exist.
"""

import argparse
import csv
import json
from pathlib import Path

from PIL import Image

SIDEWAYS = 6  # EXIF: turn clockwise by a quarter to see it upright.
ORIENTATION = 0x0112

arguments = argparse.ArgumentParser()
arguments.add_argument("data", type=Path)
arguments.add_argument("--count", type=int, default=240)
arguments = arguments.parse_args()

rows = [json.loads(line) for line in (arguments.data / "train.jsonl").read_text().splitlines()]
rows = [row for row in rows if row["type"] == "colour" and row["form"] == "short"][: arguments.count]
Path("photos").mkdir(exist_ok=True)
table = []
for at, row in enumerate(rows):
    picture = Image.open(arguments.data / row["image"]).convert("RGB")
    picture = picture.resize((picture.width * 12, picture.height * 12), Image.Resampling.BICUBIC)
    mark = Image.Exif()
    if at % 4 == 0:
        picture = picture.transpose(Image.Transpose.ROTATE_90)
        mark[ORIENTATION] = SIDEWAYS
    name = f"IMG_{at + 1:04}.jpg"
    picture.save(Path("photos") / name, quality=90, exif=mark)
    table.append((name, row["answer"]))
cut = Path("photos") / table[7][0]
cut.write_bytes(cut.read_bytes()[:300])
table.append(("IMG_9999.jpg", "red"))
with open("labels.csv", "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(("file", "colour"))
    writer.writerows(table)
