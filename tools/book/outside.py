#!/usr/bin/env python3
"""A preprocessor of mdBook: relative links that lead out of docs become links into the repository. A link to a missing file is an error."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()((?:\.\./)+[^)\s]*)(?=\))")

if sys.argv[1:2] == ["supports"]:
    sys.exit(0)
context, book = json.load(sys.stdin)
repository = context["config"]["output"]["html"]["git-repository-url"]
missing = []


def outside(chapter):
    folder = (DOCS / chapter["source_path"]).parent

    def link(match):
        path, _, anchor = match[1].partition("#")
        target = (folder / path).resolve()
        if not target.exists():
            missing.append(f"{chapter['source_path']}: {match[1]}")
        if target.is_relative_to(DOCS):
            return match[1]
        kind = "tree" if target.is_dir() else "blob"
        return f"{repository}/{kind}/main/{target.relative_to(ROOT)}" + (f"#{anchor}" if anchor else "")

    chapter["content"] = LINK.sub(link, chapter["content"])
    for item in chapter["sub_items"]:
        if "Chapter" in item:
            outside(item["Chapter"])


for item in book["items"]:
    if "Chapter" in item:
        outside(item["Chapter"])
if missing:
    sys.exit("links to missing files: " + ", ".join(missing))
json.dump(book, sys.stdout)
