#!/usr/bin/env python3
"""Prints a seeded sample of the project's prose for a fresh reader: doc comments, messages and paragraphs of pages.

    python3 tools/sample.py [--seed 1] [--comments 40] [--messages 40] [--paragraphs 10]

A reader who does not know the code marks what an English-speaking engineer would rewrite. Fewer than 4 of 90 is the aim.
"""

import argparse
import pathlib
import random
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.S)
# Functions and methods whose text a person reads.
TOLD = re.compile(r"(Problem::(?:usage|failure|stopped)|\.(?:help|expected|got)|Dropped|Refused|#\[error|warn!|console\.line)\(", re.S)


def comments():
    for path in sorted((ROOT / "crates").glob("*/src/**/*.rs")):
        block = []
        for number, line in enumerate(path.read_text().splitlines(), 1):
            said = re.match(r"\s*//[/!] ?(.*)", line)
            if said:
                block.append(said[1])
            elif block:
                yield f"{path.relative_to(ROOT)}:{number}", "\n".join(block) + f"\n    {line.strip()}"
                block = []


def messages():
    for path in sorted((ROOT / "crates").glob("*/src/**/*.rs")):
        text = path.read_text().split("#[cfg(test)]")[0]
        for call in TOLD.finditer(text):
            found = STRING.search(text, call.end(), call.end() + 400)
            if found and len(found[1].split()) > 3:
                line = text.count("\n", 0, found.start()) + 1
                yield f"{path.relative_to(ROOT)}:{line}", re.sub(r"\\\n\s*", "", found[1])


def paragraphs():
    for path in [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
        for part in text.split("\n\n"):
            if len(part.split()) > 25 and not part.lstrip().startswith(("|", "#", "<")):
                yield str(path.relative_to(ROOT)), part.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    for kind, count in (("comments", 40), ("messages", 40), ("paragraphs", 10)):
        parser.add_argument(f"--{kind}", type=int, default=count)
    args = parser.parse_args()
    for kind, every in (("comments", comments), ("messages", messages), ("paragraphs", paragraphs)):
        found = list(every())
        chosen = random.Random(args.seed).sample(found, min(getattr(args, kind), len(found)))
        print(f"# {len(chosen)} of {len(found)} {kind}\n")
        for at, (place, text) in enumerate(chosen, 1):
            print(f"{at}. {place}\n{text}\n")


if __name__ == "__main__":
    main()
