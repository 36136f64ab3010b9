#!/usr/bin/env python3
"""Checks licences and origins of all dependencies against deny.toml, where `cargo deny` is not installed.

Checked, as `cargo deny check licenses sources` would: every package comes from crates.io or is part of this workspace, and
its SPDX expression is satisfied by the allowed licences. Not checked: known faults (advisories), whose list is on the network.
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
            # What is allowed without the exception, which only adds rights, is allowed with it.
            return f"{token} WITH {exception}" in allowed or token in allowed
        return token in allowed

    return any_of()


def main():
    rules = tomllib.loads((ROOT / "deny.toml").read_text())
    allowed = set(rules["licenses"]["allow"])
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--all-features"]
    command += ["--filter-platform", "x86_64-unknown-linux-gnu"]
    packages = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)["packages"]
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
