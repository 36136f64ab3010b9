#!/usr/bin/env python3
"""Writes rows.jsonl with 400 questions about the colour of one shape, and texts.jsonl with the answers to 40 of them for fine-tuning, from the
folder `data` of a demo's run: `colour_rows.py data`."""

import json
import sys
from pathlib import Path

data = Path(sys.argv[1])
rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
rows = [row for row in rows if row["type"] == "colour" and row["form"] == "short"][:400]
Path("rows.jsonl").write_text("".join(
    json.dumps({"image": str(data / row["image"]), "problem": row["conversations"][0]["value"].removeprefix("<image>\n"),
                "solution": row["answer"], "colour": row["answer"]}) + "\n" for row in rows))
Path("texts.jsonl").write_text("".join(
    json.dumps({"image": str(data / row["image"]), "prompt": row["conversations"][0]["value"].removeprefix("<image>\n"),
                "completion": row["conversations"][1]["value"]}) + "\n" for row in rows[:40]))
