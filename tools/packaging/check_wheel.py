#!/usr/bin/env python3
"""Checks wheels of the Python package: `check_wheel.py WHEEL…`. Prints the size of each; needs `readelf`.

Checked: the tags say CPython 3.9, the stable interface and glibc 2.28; the metadata are complete, and no other package is needed;
the files are those of the package and its licences; the module needs no symbol above glibc 2.28 and no library besides those of
glibc and the compiler; no file holds a path of the machine that built it.
"""

import email
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "bindings/python/python/omnigrpo"
GLIBC = (2, 28)
# Libraries of glibc, and of the compiler for stack traces. Every system with glibc has them.
LIBRARIES = re.compile(r"(lib(c|m|dl|rt|pthread|gcc_s)\.so\.\d+|ld-linux-.+\.so\.\d+)$")
# The limit leaves room below PyPI's 100 MB for the file that a user downloads.
MOST_BYTES = 30_000_000
FIELDS = ("Name", "Version", "Summary", "Requires-Python", "License-Expression", "Project-URL", "Keywords", "Classifier")


def readelf(option, file):
    return subprocess.run(["readelf", option, "--wide", file], check=True, stdout=subprocess.PIPE, text=True).stdout


def module_problems(file):
    """Return what keeps the module from loading on other systems."""
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"Name: GLIBC_([\d.]+)", readelf("--version-info", file))}
    if not versions or max(versions) > GLIBC:
        yield f"the module needs symbols of glibc {sorted(versions)}, expected at most {GLIBC}"
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("--dynamic", file))
    foreign = [library for library in needed if not LIBRARIES.match(library)]
    if foreign:
        yield f"the module needs the libraries {', '.join(foreign)}, expected those of glibc alone"
    if "PyInit__omnigrpo" not in readelf("--dyn-syms", file):
        yield "the module has no function PyInit__omnigrpo"


def problems(wheel):
    """Return what is wrong with a wheel."""
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    tag = re.fullmatch(rf"omnigrpo-{re.escape(version)}-(cp39-abi3-manylinux_2_28_(x86_64|aarch64))\.whl", wheel.name)
    if tag is None:
        yield f"its name is no omnigrpo-{version}-cp39-abi3-manylinux_2_28_ARCHITECTURE.whl"
        return
    if wheel.stat().st_size > MOST_BYTES:
        yield f"it has {wheel.stat().st_size} bytes, expected at most {MOST_BYTES}"
    info = f"omnigrpo-{version}.dist-info"
    expected = {f"omnigrpo/{file.name}" for file in PACKAGE.iterdir() if file.suffix in (".py", ".pyi", ".typed")}
    expected |= {"omnigrpo/_omnigrpo.abi3.so", f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD", f"{info}/entry_points.txt"}
    expected |= {f"{info}/licenses/LICENSE", f"{info}/licenses/LICENSES-OF-DEPENDENCIES.txt"}
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        if names ^ expected:
            yield f"missing: {sorted(expected - names)}; unexpected: {sorted(names - expected)}"
        tags = re.findall(r"^Tag: (.+)$", archive.read(f"{info}/WHEEL").decode(), re.M)
        if tags != [tag[1]]:
            yield f"WHEEL has the tags {tags}, expected {tag[1]}"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        missing = [field for field in FIELDS if not metadata[field]]
        if missing or metadata["Version"] != version or metadata["Requires-Python"] != ">=3.9" or len(metadata.get_payload()) < 1000:
            yield f"METADATA lacks {missing}, or has another version, Python or no description: {metadata.items()}"
        if metadata["Requires-Dist"]:
            yield f"it needs {metadata.get_all('Requires-Dist')}, expected no other package"
        if "omnigrpo=omnigrpo.__main__:main" not in archive.read(f"{info}/entry_points.txt").decode().replace(" ", ""):
            yield "the command `omnigrpo` is missing"
        own = {str(path).encode() for path in (Path.home(), ROOT, os.environ.get("CARGO_HOME", "")) if len(str(path)) > 1}
        for name in sorted(names):
            content = archive.read(name)
            found = [path.decode() for path in own if path + b"/" in content]
            found += [path.decode(errors="replace") for path in re.findall(rb"(?<![\w.~-])/(?:home|Users|tmp)/[\w.]+/[\w./-]+", content)]
            if found:
                yield f"{name} holds paths of a machine: {found[:5]}"
        yield from module_problems(archive.extract("omnigrpo/_omnigrpo.abi3.so", folder))


def main():
    failed = False
    for wheel in map(Path, sys.argv[1:]):
        for problem in problems(wheel):
            print(f"{wheel.name}: {problem}")
            failed = True
        if wheel.is_file():
            print(f"{wheel}: {wheel.stat().st_size} bytes")
    sys.exit(failed or len(sys.argv) < 2)


if __name__ == "__main__":
    main()
