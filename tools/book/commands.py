#!/usr/bin/env python3
"""Runs the commands of the book and compares their output with the pages: `commands.py PROGRAM [--write] [CHAPTER…]`.

The chapters are docs/guide/*.md. The blocks of a chapter run in order, in one empty folder, with PROGRAM as `omnigrpo` on the path.
Comments of a page control them:

    <!-- prepare: COMMANDS -->   commands that the reader does not see; $DEMO is a run directory of the demo after its first step, with
                                 `data` and `start-model`, $BOOK is tools/book, and $ROOT is this source tree
    <!-- file: NAME -->          the next block is the content of this file
    <!-- not run: REASON -->     the next block is only shown; the summary lists it with its reason
    <!-- fails: STATUS -->       the next block ends with this status

A block of `sh` runs with `bash -euo pipefail`, and its processes end with it. A block of `text` that follows one shows its output,
standard error included. A shown line must equal a line of the output, after the masks below; a shown line `…` stands for any number
of lines. Masks: a number with its unit is `#`, bars and curves are `~`, spaces are one space, and the folder of the chapter is left out.
`--write` puts the numbers of this run into the pages.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs/guide"
ITEM = re.compile(r"<!-- (prepare|file|not run|fails):\s+(.*?)\s*-->|^```(\w*)\n(.*?)^```$", re.S | re.M)
# Blocks of these languages do something, so each is run, is a file, or says why not.
DOING = {"sh", "python", "bash"}
BLOCK_SECS = 900


class Wrong(Exception):
    """A command or an output that is not as the page says."""


def mask(line):
    line = re.sub(r"[━─╸▏▎▍▌▋▊▉█▁▂▃▄▅▆▇▰▱═]+", "~", line)
    line = re.sub(r"\d+(\.\d+)?([eE][-+]?\d+)?", "#", line)
    line = re.sub(r"# (ms|s|min|h|MB|GB|kB)\b", "#", line)
    return re.sub(r"#(,? #)+", "#", re.sub(r"\s+", " ", line).strip())


def place_of(shown, said):
    """For each shown line, its index in the output; None for `…`."""
    masked = [mask(line) for line in said]

    def search(at, start, free):
        if at == len(shown):
            return [] if free or start == len(said) else None
        if shown[at] == "…":
            rest = search(at + 1, start, True)
            return None if rest is None else [None, *rest]
        for index in range(start, len(said)):
            if masked[index] == mask(shown[at]):
                rest = search(at + 1, index + 1, False)
                if rest is not None:
                    return [index, *rest]
            if not free:
                return None
        return None

    return search(0, 0, False)


def shell(commands, folder, env):
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(["bash", "-euo", "pipefail", "-c", commands], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=said,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            # The shell's own end counts: a server that it started may stay.
            process.wait(BLOCK_SECS)
        except subprocess.TimeoutExpired:
            raise Wrong(f"{commands.splitlines()[0]}: took more than {BLOCK_SECS} s") from None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        said.seek(0)
        text = said.read().decode(errors="replace")
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|\r", "", text).replace(f"{folder}/", "").replace(str(folder), ".")
    return process.returncode, text.rstrip("\n").split("\n")


def chapter(page, env, write):
    folder = Path(tempfile.mkdtemp(prefix="book-")).resolve()
    text = page.read_text()
    not_run, ran, said, changes = [], 0, None, []
    file = reason = None
    status = 0
    try:
        for item in ITEM.finditer(text):
            kind, value, language, body = item.groups()
            where = f"{page.name}:{text[:item.start()].count(chr(10)) + 1}"
            if kind == "prepare":
                code, output = shell(value, folder, env)
                if code:
                    raise Wrong(f"{where}: the preparation ended with {code}:\n" + "\n".join(output[-20:]))
            elif kind == "file":
                file = value
            elif kind == "not run":
                reason = value
            elif kind == "fails":
                status = int(value)
            elif file:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text(body)
                file = said = None
            elif reason:
                not_run.append((where, body.strip().split("\n")[0], reason))
                reason = said = None
            elif language == "sh":
                code, said = shell(body, folder, env)
                if code != status:
                    raise Wrong(f"{where}: expected status {status}, got {code}:\n" + "\n".join(said[-25:]))
                ran += len([line for line in body.splitlines() if line and line[0] not in " #"])
                status = 0
            elif language in DOING:
                raise Wrong(f"{where}: a block of {language} is neither a file nor marked as not run")
            elif language == "text" and said is not None:
                shown = body.rstrip("\n").split("\n")
                found = place_of(shown, said)
                if found is None:
                    masked = {mask(one) for one in said}
                    absent = [line for line in shown if line != "…" and mask(line) not in masked]
                    raise Wrong("\n".join([f"{where}: the shown output is not that of the command", *(f"absent: {line}" for line in absent),
                                           "it printed:", *said[:60]]))
                new = "".join((line if at is None else said[at]).rstrip() + "\n" for line, at in zip(shown, found))
                changes.append((item.start(4), item.end(4), new))
                said = None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if write:
        for start, end, new in reversed(changes):
            text = text[:start] + new + text[end:]
        page.write_text(text)
    return ran, len(changes), not_run


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("program", type=Path)
    arguments.add_argument("chapters", nargs="*")
    arguments.add_argument("--write", action="store_true")
    arguments.add_argument("--demo", type=Path, help="run directory of the demo, so that none is made")
    arguments = arguments.parse_intermixed_args()
    program = arguments.program.resolve()
    scratch = Path(tempfile.mkdtemp(prefix="book-"))
    (scratch / "bin").mkdir()
    # A wrapper, because the name of the program is part of its messages.
    (scratch / "bin/omnigrpo").symlink_to(program)
    env = {**os.environ, "PATH": f"{scratch / 'bin'}:{os.environ['PATH']}", "BOOK": str(ROOT / "tools/book"), "ROOT": str(ROOT), "NO_COLOR": "1",
           "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "COLUMNS": "110", "XDG_CACHE_HOME": str(scratch / "cache"), "LC_ALL": "C.UTF-8"}
    status = 0
    try:
        demo = (arguments.demo or scratch / "demo").resolve()
        if not demo.exists():
            subprocess.run([program, "demo", "--max_steps", "1", "--output_dir", demo], capture_output=True, check=True)
        env["DEMO"] = str(demo)
        pages = [GUIDE / f"{name}.md" for name in arguments.chapters] or sorted(GUIDE.glob("*.md"))
        for page in pages:
            start = time.monotonic()
            try:
                ran, compared, not_run = chapter(page, env, arguments.write)
            except Wrong as wrong:
                print(f"{page.name}: FAILED\n{wrong}", flush=True)
                status = 1
                continue
            print(f"{page.name}: {ran} commands, {compared} outputs, {time.monotonic() - start:.0f} s", flush=True)
            for where, command, reason in not_run:
                print(f"  not run: {where}: {shlex.quote(command)[:70]}: {reason}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
