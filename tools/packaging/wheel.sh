#!/usr/bin/env bash
# Builds the Python package: dist/omnigrpo-VERSION-cp39-abi3-manylinux_2_28_ARCH.whl, with the module and the program, for
# CPython 3.9 and later and glibc 2.28 (Debian 10, Ubuntu 20.04, RHEL 8). Zig links it. Needs the Python packages `maturin` and
# `ziglang`. check_wheel.py checks the result and prints its size.
#
#     tools/packaging/wheel.sh [x86_64|aarch64] [PROFILE]     x86_64 and dist by default
set -euo pipefail
cd "$(dirname "$0")/../.."

architecture=${1:-x86_64}
profile=${2:-dist}
triple=$architecture-unknown-linux-gnu
command -v maturin >/dev/null || { echo "maturin is missing: pip install maturin ziglang" >&2; exit 1; }
rustup target add "$triple" >/dev/null 2>&1 || true
# Messages of panics and assertions name source files, without the folders of this machine.
cargo=${CARGO_HOME:-$HOME/.cargo}
export RUSTFLAGS="${RUSTFLAGS-} --remap-path-prefix=$PWD=omnigrpo --remap-path-prefix=$cargo=cargo"
export CFLAGS="${CFLAGS-} -ffile-prefix-map=$cargo=cargo"
# One commit gives one wheel.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
OMNIGRPO_COMMIT=$(git rev-parse --short=12 HEAD)
export OMNIGRPO_COMMIT
rm -f dist/omnigrpo-*_"$architecture".whl
# Compiled files of an interpreter that has run the package in place.
find bindings/python/python -name __pycache__ -prune -exec rm -rf {} +
python3 tools/packaging/check_dependencies.py --licences bindings/python/LICENSES-OF-DEPENDENCIES.txt omnigrpo-python
maturin build --manifest-path bindings/python/Cargo.toml --profile "$profile" --target "$triple" --zig \
    --compatibility manylinux_2_28 --out dist
python3 tools/packaging/check_wheel.py dist/omnigrpo-*_"$architecture".whl
