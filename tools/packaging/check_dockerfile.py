#!/usr/bin/env python3
"""Checks the Dockerfile without a container engine.

Checked: every COPY names files of the repository that .dockerignore leaves, or a file that an earlier stage builds; all that
the crates embed from outside their folder is copied; the toolchain is that of rust-toolchain.toml and the profile is in
Cargo.toml; RUN lines are correct shell; packages exist where apt's lists are at hand; the image runs as a plain user;
ENTRYPOINT and CMD are lists. With `--build` the build stage's RUN line runs too, on a copy of what the COPY lines bring.

Not checked: that the base images exist, and that the image starts.
"""

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
problems = []


def problem(what):
    problems.append(what)


def instructions(text):
    """(word, rest) of each instruction, lines with a backslash joined, comments left out."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word.upper(), rest.strip()


def ignored(path, patterns):
    return any(fnmatch.fnmatch(str(p), pattern) for p in [path, *path.parents] for pattern in patterns)


def check_packages(wanted):
    """Asks the Python index whether packages exist in these versions; nothing without a network."""
    asked = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--break-system-packages", *wanted]
    done = subprocess.run(asked, capture_output=True, text=True)
    if not done.returncode:
        return
    said = done.stderr.strip().splitlines()[-1:]
    if "No matching distribution" in done.stderr and "Retrying" not in done.stderr:
        problem(f"pip install {' '.join(wanted)}: {said}")
    else:
        print(f"NOTICE: the index was not asked for {' '.join(wanted)}: {said}")


def check_shell(script):
    checked = subprocess.run(["sh", "-n", "-c", script], capture_output=True, text=True)
    if checked.returncode:
        problem(f"RUN {script}: {checked.stderr.strip()}")
    for command in re.findall(r"apt-get install ([^&|;]*)", script):
        names = [word for word in command.split() if not word.startswith("-")]
        if shutil.which("apt-cache") and any(Path("/var/lib/apt/lists").glob("*Packages*")):
            for name in names:
                if subprocess.run(["apt-cache", "show", name], capture_output=True).returncode:
                    problem(f"apt knows no package {name}")
        if "rm -rf /var/lib/apt/lists" not in script:
            problem(f"RUN {script}: leaves apt's lists in the image")
    for command in re.findall(r"pip install ([^&|;]*)", script):
        check_packages([word for word in shlex.split(command) if not word.startswith("-")])
    if (profile := re.search(r"--profile (\S+)", script)) and profile[1] not in tomllib.loads((ROOT / "Cargo.toml").read_text())["profile"]:
        problem(f"Cargo.toml has no profile {profile[1]}")


def main():
    patterns = [line for line in (ROOT / ".dockerignore").read_text().split("\n") if line and not line.startswith("#")]
    channel = tomllib.loads((ROOT / "rust-toolchain.toml").read_text())["toolchain"]["channel"]
    stages, copied, builds, users = {}, [], [], {}
    for word, rest in instructions((ROOT / "Dockerfile").read_text()):
        match word:
            case "FROM":
                image, *name = re.split(r"\s+AS\s+", rest, flags=re.IGNORECASE)
                if image not in stages and (":" not in image or image.endswith(":latest")):
                    problem(f"FROM {image}: expected a version")
                if image.startswith("rust:") and not image.startswith(f"rust:{channel}"):
                    problem(f"FROM {image}: rust-toolchain.toml says {channel}")
                stage = name[0] if name else f"stage {len(stages)}"
                stages[stage], workdir, users[stage] = [], Path("/"), users.get(image)
            case "WORKDIR":
                workdir = workdir / rest
            case "RUN":
                check_shell(rest)
                stages[stage].append((workdir, rest))
                if "cargo build" in rest:
                    builds.append(rest)
            case "COPY":
                *sources, _target = [part for part in shlex.split(rest) if not part.startswith("--")]
                origin = re.search(r"--from=(\S+)", rest)
                for source in sources:
                    if origin is None:
                        copied.append(Path(source))
                        if not (ROOT / source).exists() or ignored(Path(source), patterns):
                            problem(f"COPY {source}: not in the repository, or left out by .dockerignore")
                    elif origin[1] not in stages:
                        problem(f"COPY {rest}: no stage {origin[1]} above")
                    else:
                        # Output of `cargo build`: target/PROFILE/PACKAGE below the directory it ran in.
                        made = [
                            where / "target" / re.search(r"--profile (\S+)", run)[1] / re.search(r"--package (\S+)", run)[1]
                            for where, run in stages[origin[1]]
                            if "cargo build" in run
                        ]
                        if Path(source) not in made:
                            problem(f"COPY {source}: stage {origin[1]} makes {', '.join(map(str, made))}")
            case "USER":
                users[stage] = rest
            case "ENV" | "ARG":
                if not all(re.fullmatch(r"\w+=\S*", word) for word in shlex.split(rest)):
                    problem(f"{word} {rest}: expected NAME=VALUE")
            case "ENTRYPOINT" | "CMD":
                try:
                    assert isinstance(json.loads(rest), list)
                except (ValueError, AssertionError):
                    problem(f"{word} {rest}: expected a list of strings")
            case other:
                problem(f"{other}: not an instruction this script knows")
    for stage, user in users.items():
        if user in (None, "root", "0") and not any("cargo build" in run for _, run in stages[stage]):
            problem(f"the image of {stage} runs as root")
    for source in (ROOT / "crates").rglob("*.rs"):
        for included in re.findall(r'include_(?:str|bytes)!\("([^"]+)"\)', source.read_text()):
            path = (source.parent / included).resolve().relative_to(ROOT)
            if "tests" not in source.parts and not any(path.is_relative_to(c) for c in copied):
                problem(f"{source.relative_to(ROOT)} embeds {path}, which is not copied into the build")
    if "--build" in sys.argv[1:] and not problems:
        with tempfile.TemporaryDirectory() as place:
            for path in copied:
                copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
                copy(ROOT / path, Path(place) / path)
            for build in builds:
                subprocess.run(["sh", "-c", build], cwd=place, check=True)
    for what in problems:
        print(f"Dockerfile: {what}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
