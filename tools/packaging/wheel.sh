#!/usr/bin/env bash
# Builds the Python package: dist/omnigrpo-VERSION-cp310-abi3-manylinux_2_28_ARCH.whl, with the module and the program, for
# CPython 3.10 and later and glibc 2.28 (Debian 10, Ubuntu 20.04, RHEL 8). Zig links it. Needs the Python packages `maturin` and
# `ziglang`.
#
#     tools/packaging/wheel.sh [x86_64|aarch64] [PROFILE]     x86_64 and dist by default
set -euo pipefail
cd "$(dirname "$0")/../.."

architecture=${1:-x86_64}
profile=${2:-dist}
triple=$architecture-unknown-linux-gnu
command -v maturin >/dev/null || { echo "maturin is missing: pip install maturin ziglang" >&2; exit 1; }
rustup target add "$triple" >/dev/null 2>&1 || true
rm -f dist/omnigrpo-*_"$architecture".whl
maturin build --manifest-path bindings/python/Cargo.toml --profile "$profile" --target "$triple" --zig \
    --compatibility manylinux_2_28 --out dist
wheel=$(echo dist/omnigrpo-*-cp310-abi3-manylinux_2_28_"$architecture".whl)
# The limit leaves room below PyPI's 100 MB for the file that a user downloads.
size=$(stat --format=%s "$wheel")
((size < 30000000)) || { echo "$wheel has $size bytes, expected less than 30 MB" >&2; exit 1; }
content=$(python3 -m zipfile -l "$wheel")
for file in omnigrpo/_omnigrpo.abi3.so omnigrpo/_reward.py omnigrpo/__main__.py omnigrpo/py.typed; do
    [[ $content == *"$file"* ]] || { echo "$wheel lacks $file" >&2; exit 1; }
done
echo "$wheel: $size bytes"
