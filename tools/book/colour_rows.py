#!/usr/bin/env python3
"""Writes the rows of the book's commands from the folder `data` of a demo's run: `colour_rows.py data`.

rows.jsonl has 400 questions about the colour of one shape, texts.jsonl the answers to 40 of them for fine-tuning, and clips.jsonl 64
questions about movements.
"""

import json
import sys
from pathlib import Path

data = Path(sys.argv[1])
every = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
rows = [row for row in every if row["type"] == "colour" and row["form"] == "short"][:400]
Path("rows.jsonl").write_text("".join(
    json.dumps({"image": str(data / row["image"]), "problem": row["conversations"][0]["value"].removeprefix("<image>\n"),
                "solution": row["answer"], "colour": row["answer"]}) + "\n" for row in rows))
Path("texts.jsonl").write_text("".join(
    json.dumps({"image": str(data / row["image"]), "prompt": row["conversations"][0]["value"].removeprefix("<image>\n"),
                "completion": row["conversations"][1]["value"]}) + "\n" for row in rows[:40]))
clips = [row for row in every if "video" in row and row["form"] == "short"][:64]
Path("clips.jsonl").write_text("".join(
    json.dumps({"video": str(data / row["video"]), "problem": row["conversations"][0]["value"].removeprefix("<video>\n"),
                "solution": row["answer"]}) + "\n" for row in clips))
