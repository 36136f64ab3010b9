#!/usr/bin/env python3
"""Writes the rows of the demo as a benchmark: `python3 rows.py DEMO FOLDER`.

DEMO is a run directory of `omnigrpo demo`. FOLDER gets `shapes.jsonl` with the questions about pictures, for lmms-eval and `omnigrpo eval`.
Those among them that offer choices of words are also in `LMUData/Shapes.tsv`, for VLMEvalKit, and in `choices.jsonl`, for
lm-evaluation-harness. Needs no packages.
"""

import argparse
import base64
import csv
import json
import pathlib
import re

CHOICE = re.compile(r"^\(([A-D])\) (.*)$", re.M)


def rows(demo):
    data = demo.resolve() / "data"
    for line in (data / "eval.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "image" in row:
            question = row["conversations"][0]["value"].removeprefix("<image>\n")
            yield {"id": row["id"], "image": str(data / row["image"]), "question": question, "answer": row["answer"], "kind": row["type"]}


def write(demo, folder):
    own = list(rows(demo))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shapes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    (folder / "LMUData").mkdir(exist_ok=True)
    with open(folder / "LMUData" / "Shapes.tsv", "w", newline="") as file, open(folder / "choices.jsonl", "w") as lines:
        table = csv.writer(file, delimiter="\t")
        table.writerow(["index", "image", "question", "A", "B", "C", "D", "answer", "category"])
        for row in own:
            choices = list(CHOICE.findall(row["question"]))
            # VLMEvalKit finds a choice in an answer only if the choices are long enough.
            if not choices or row["answer"].isdigit():
                continue
            question, texts = row["question"].split("\n")[0], [text for _, text in choices]
            label = texts.index(row["answer"])
            picture = base64.b64encode(pathlib.Path(row["image"]).read_bytes()).decode()
            number = int(row["id"].removeprefix("eval-"))
            table.writerow([number, picture, question, *texts, choices[label][0], row["kind"]])
            lines.write(json.dumps({"question": question, "choices": texts, "label": label}) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("demo", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    given = parser.parse_args()
    write(given.demo, given.folder)


if __name__ == "__main__":
    main()
