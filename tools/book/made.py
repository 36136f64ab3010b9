"""Parts of pages that scripts make: text between `<!-- NAME: SCRIPT -->` and `<!-- end of NAME -->`."""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def fill(page, parts, check):
    """Puts each part between its marks, or compares them. Returns whether anything is wrong."""
    old = text = page.read_text()
    wrong = False
    for mark, part in parts.items():
        name = mark.split(":")[0]
        pattern = re.compile(rf"(<!-- {re.escape(mark)} -->\n).*?(\n?<!-- end of {re.escape(name)} -->)", re.S)
        text, count = pattern.subn(lambda own: f"{own[1]}\n{part}\n\n{own[2].lstrip()}", text)
        if count != 1:
            print(f"{page.relative_to(ROOT)}: expected one part `<!-- {mark} -->`, found {count}", file=sys.stderr)
            wrong = True
    if check and text != old:
        print(f"{page.relative_to(ROOT)} does not show what the recorded file holds; run the scripts that its marks name", file=sys.stderr)
        return True
    if not check:
        page.write_text(text)
    return wrong


def machine(command):
    """Where and how numbers were made."""
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.M) if info.exists() else []
    return {"commit": commit, "machine": f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} threads", "command": command}


def main(page, record, parts, make):
    """`PROGRAM` makes the record and the parts of a page; `--check` compares them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("program", nargs="?")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if not given.check:
        record.write_text(json.dumps(make(given.program), indent=1) + "\n")
    return fill(page, parts(json.loads(record.read_text())), given.check)
