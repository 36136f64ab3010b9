#!/usr/bin/env python3
"""Checks the book without building it: `check.py [--write]`.

Checked: docs/SUMMARY.md lists every page of docs; tables and texts between marks are those of the recorded files; docs/llms.txt has a line
for every page, with the page's first sentence; and the pages are not longer than readers bear. `--write` writes llms.txt.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DOCS = ROOT / "docs"
SCRIPTS = [HERE / "illnesses.py", HERE / "group.py", HERE / "card.py", ROOT / "bench/sweeps/run.py", ROOT / "bench/learning/recipes.py"]
# Words of the reference, which is docs/*.md; and of all pages, without the table of contents.
MOST_REFERENCE = 35_000
MOST_WORDS = 60_000
ENTRY = re.compile(r"^\s*(?:- )?\[(.*)\]\((.*)\)$", re.M)


def words(pages):
    return sum(len(page.read_text().split()) for page in pages)


def first_sentence(page):
    """The first sentence below the title, without marks."""
    text = page.read_text().split("\n", 1)[1].strip().split("\n\n")[0]
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(text.split())).replace("**", "")
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def llms(summary):
    lines = ["# omnigrpo", "", "> GRPO post-training for models that read, see and hear, in one Rust program with a Python module.", ""]
    for line in summary.splitlines():
        if line.startswith("# ") and line != "# Summary":
            lines += ["", f"## {line[2:]}", ""]
        elif entry := ENTRY.match(line):
            if not entry[2].startswith("decisions/0"):
                lines.append(f"- [{entry[1]}]({entry[2]}): {first_sentence(DOCS / entry[2])}")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def main():
    problems = []
    summary = (DOCS / "SUMMARY.md").read_text()
    listed = {path for _, path in ENTRY.findall(summary)}
    there = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"SUMMARY.md"}
    problems += [f"docs/SUMMARY.md does not list {path}" for path in sorted(there - listed)]
    problems += [f"docs/SUMMARY.md lists {path}, which does not exist" for path in sorted(listed - there)]
    if not problems:
        text = llms(summary)
        if "--write" in sys.argv[1:]:
            (DOCS / "llms.txt").write_text(text)
        elif (DOCS / "llms.txt").read_text() != text:
            problems.append("docs/llms.txt is out of date: run tools/book/check.py --write")
    for script in SCRIPTS:
        if subprocess.run([sys.executable, script, "--check"]).returncode:
            problems.append(f"{script.relative_to(ROOT)} --check failed")
    reference, guide, generated = ([*(DOCS / folder).glob("*.md")] for folder in (".", "guide", "generated"))
    everything = [page for page in reference + guide + generated if page.name != "SUMMARY.md"]
    print(json.dumps({"reference": words(reference), "guide": words(guide), "generated": words(generated), "all": words(everything)}))
    if words(reference) > MOST_REFERENCE:
        problems.append(f"the reference has {words(reference)} words, expected at most {MOST_REFERENCE}")
    if words(everything) > MOST_WORDS:
        problems.append(f"all pages have {words(everything)} words, expected at most {MOST_WORDS}")
    for line in problems:
        print(line, file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
