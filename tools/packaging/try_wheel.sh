#!/usr/bin/env bash
# Installs a wheel of the Python package in fresh environments of the oldest and the newest CPython of this machine, and runs its
# tests and the program there. At last it measures the cost of a reward.
#
#     tools/packaging/try_wheel.sh dist/omnigrpo-….whl
set -euo pipefail

wheel=$(realpath "${1:?usage: tools/packaging/try_wheel.sh WHEEL}")
cd "$(dirname "$0")/../../bindings/python/tests"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# pyenv has interpreters that are not on PATH.
interpreters=()
for version in 3.{9..20}; do
    for interpreter in "$(command -v "python$version" || true)" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
        if "$interpreter" -m venv --help >/dev/null 2>&1; then
            interpreters+=("$interpreter")
            break
        fi
    done
done
((${#interpreters[@]})) || { echo "there is no CPython 3.9 or later" >&2; exit 1; }
for interpreter in "${interpreters[0]}" "${interpreters[-1]}"; do
    "$interpreter" --version
    own=$scratch/environment
    "$interpreter" -m venv --clear "$own"
    "$own/bin/pip" install --quiet --disable-pip-version-check "$wheel" pytest pillow numpy
    "$own/bin/python" -m pytest -q -rs -p no:cacheprovider .
    "$own/bin/omnigrpo" demo --max_steps 3 --output_dir "$scratch/run" >/dev/null
    [[ -s $scratch/run/model.safetensors ]] || { echo "the demo left no model" >&2; exit 1; }
    rm -rf "$scratch/run"
done
"$own/bin/python" overhead.py
