#!/usr/bin/env python3
"""Writes the types of the Python package's settings from the table of settings.

    omnigrpo schema | tools/packaging/stubs.py            write bindings/python/python/omnigrpo/_settings.pyi
    omnigrpo schema | tools/packaging/stubs.py --check    fail if that file differs
"""

import json
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "bindings/python/python/omnigrpo/_settings.pyi"
HEAD = '''"""Settings by name, for `GRPOConfig` and others. Written by tools/packaging/stubs.py; do not edit."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

class Settings(TypedDict, total=False):
'''
# Settings that are parameters of their own.
PARAMETERS = ("model", "output_dir", "reward_funcs", "row")
PLAIN = {"integer": "int", "number": "float", "string": "str | PathLike[str]", "boolean": "bool"}


def kind(schema):
    """Return the Python type of the values that a schema accepts."""
    if "enum" in schema:
        values = schema["enum"]
        return "bool" if True in values else f"Literal[{', '.join(json.dumps(value) for value in values)}]"
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(kind(one) for one in schema["anyOf"]))
    if schema["type"] == "array":
        return f"Sequence[{kind(schema['items'])}]"
    if schema["type"] == "object":
        return "Mapping[str, Any]"
    if isinstance(schema["type"], list):
        return "str | float | bool"
    return PLAIN[schema["type"]]


def main():
    properties = json.load(sys.stdin)["properties"]
    lines = []
    for name, schema in properties.items():
        if name in PARAMETERS:
            continue
        if "$ref" in schema:
            schema = properties[schema["$ref"].rsplit("/", 1)[1]]
        lines.append(f"    {name}: {kind(schema)}\n")
    text = HEAD + "".join(lines)
    if "--check" not in sys.argv:
        FILE.write_text(text)
    elif not FILE.is_file() or FILE.read_text() != text:
        sys.exit(f"{FILE.name} differs from the table of settings: run `omnigrpo schema | tools/packaging/stubs.py`")


if __name__ == "__main__":
    main()
