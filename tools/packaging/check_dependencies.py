#!/usr/bin/env python3
"""Checks licences and origins of all dependencies against deny.toml, where `cargo deny` is not installed.

Checked, as `cargo deny check licenses sources` would: every package comes from crates.io or is part of this workspace, and
its SPDX expression is satisfied by the allowed licences. Not checked: known faults (advisories), whose list is on the network.

    check_dependencies.py                              check
    check_dependencies.py --licences FILE [PACKAGE]    write the texts of the licences of a package's dependencies to FILE; the
                                                       package is omnigrpo by default
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def satisfied(expression, allowed):
    """Whether an SPDX expression can be met with the allowed licences. `/` is an old way to write OR."""
    tokens = re.findall(r"\(|\)|[^\s()]+", expression.replace("/", " OR "))

    def any_of():
        value = all_of()
        while tokens and tokens[0] == "OR":
            tokens.pop(0)
            right = all_of()
            value = value or right
        return value

    def all_of():
        value = one()
        while tokens and tokens[0] == "AND":
            tokens.pop(0)
            right = one()
            value = value and right
        return value

    def one():
        token = tokens.pop(0)
        if token == "(":
            value = any_of()
            tokens.pop(0)
            return value
        if tokens[:1] == ["WITH"]:
            tokens.pop(0)
            exception = tokens.pop(0)
            # A licence that is allowed without the exception, which only adds rights, is allowed with it.
            return f"{token} WITH {exception}" in allowed or token in allowed
        return token in allowed

    return any_of()


def metadata():
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--all-features"]
    command += ["--filter-platform", "x86_64-unknown-linux-gnu"]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)


def linked(graph, name):
    """Ids of the foreign packages that a package is linked with: without tests and build scripts."""
    nodes = {node["id"]: node for node in graph["resolve"]["nodes"]}
    program = next(package["id"] for package in graph["packages"] if package["name"] == name)
    found, todo = set(), [program]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [d["pkg"] for d in nodes[node]["deps"] if any(kind["kind"] is None for kind in d["dep_kinds"])]
    return found


def write_licences(file, name="omnigrpo"):
    """Writes one text with the licences of all packages that a package is linked with."""
    graph = metadata()
    ids, parts, missing = linked(graph, name), [], []
    for package in graph["packages"]:
        if package["id"] not in ids or package["source"] is None:
            continue
        folder = Path(package["manifest_path"]).parent
        texts = [path for path in sorted(folder.iterdir()) if re.match(r"(?i)(licen[cs]e|copying|notice|unlicense)", path.name)]
        texts = [path for path in texts if path.is_file()]
        parts.append(f"{'=' * 80}\n{package['name']} {package['version']} ({package['license']})\n{package['repository'] or ''}\n")
        parts += [path.read_text(errors="replace") for path in texts]
        if not texts:
            missing.append(package["name"])
    Path(file).write_text("\n".join(parts))
    print(f"{len(parts)} texts of licences; packages that name their licence and hold no text: {', '.join(missing) or 'none'}")


def main():
    if sys.argv[1:2] == ["--licences"]:
        write_licences(*sys.argv[2:])
        return
    rules = tomllib.loads((ROOT / "deny.toml").read_text())
    allowed = set(rules["licenses"]["allow"])
    packages = metadata()["packages"]
    problems = []
    for package in packages:
        name = f"{package['name']} {package['version']}"
        source = package["source"]
        if source is not None and not (source.startswith("registry+") and source.endswith("/crates.io-index")):
            problems.append(f"{name} comes from {source}")
        if not package["license"]:
            problems.append(f"{name} names no licence")
        elif not satisfied(package["license"], allowed):
            problems.append(f"{name} is under {package['license']}; deny.toml allows {', '.join(sorted(allowed))}")
    sources = {package["source"] for package in packages} - {None}
    if len(sources) > 1:
        problems.append(f"packages come from {len(sources)} registries: {', '.join(sorted(sources))}")
    for what in problems:
        print(what)
    print(f"licences and origins of {len(packages)} packages looked at")
    print("NOTICE: advisories were not checked: whether a package has a known fault is not known (install cargo-deny for that)")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
