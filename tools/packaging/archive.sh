#!/usr/bin/env bash
# Builds what a release hands out: dist/omnigrpo-VERSION-x86_64-unknown-linux-gnu.tar.gz with the program, completions for
# bash, zsh and fish, man pages, README, CHANGELOG and licences; and dist/SHA256SUMS. The program needs glibc 2.28 (Debian 10,
# Ubuntu 20.04, RHEL 8): zig links it, from the Python packages `ziglang` and `cargo-zigbuild`.
#
#     tools/packaging/archive.sh 0.3.0
set -euo pipefail
cd "$(dirname "$0")/../.."

version=${1:?usage: tools/packaging/archive.sh VERSION}
stated=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
[[ $version == "$stated" ]] || { echo "the release is $version, Cargo.toml says $stated" >&2; exit 1; }
grep -q "^## $version " CHANGELOG.md || { echo "CHANGELOG.md has no section for $version" >&2; exit 1; }
command -v cargo-zigbuild >/dev/null || { echo "cargo-zigbuild is missing: pip install ziglang cargo-zigbuild" >&2; exit 1; }
triple=x86_64-unknown-linux-gnu
name=omnigrpo-$version-$triple
binary=${CARGO_TARGET_DIR:-target}/$triple/dist/omnigrpo

OMNIGRPO_COMMIT=$(git rev-parse --short=12 HEAD)
export OMNIGRPO_COMMIT
cargo zigbuild --locked --profile dist --package omnigrpo --target "$triple.2.28"
said=$("$binary" --version)
[[ $said == *"($OMNIGRPO_COMMIT)" ]] || { echo "\`--version\` said \"$said\", expected the commit $OMNIGRPO_COMMIT" >&2; exit 1; }
newest=$(objdump -T "$binary" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -1)
[[ $(printf '%s\n' GLIBC_2.28 "$newest" | sort -V | tail -1) == GLIBC_2.28 ]] || {
    echo "the program needs $newest, expected at most GLIBC_2.28" >&2
    exit 1
}
size=$(stat --format=%s "$binary")
((size < 80000000)) || { echo "the program has $size bytes, expected less than 80 MB" >&2; exit 1; }
rm -rf "dist/$name"
mkdir -p "dist/$name/completions" "dist/$name/man"
cp "$binary" README.md CHANGELOG.md LICENSE "dist/$name/"
python3 tools/packaging/check_dependencies.py --licences "dist/$name/LICENSES-OF-DEPENDENCIES.txt"
for shell in bash zsh fish; do
    "$binary" completions "$shell" >"dist/$name/completions/omnigrpo.$shell"
done
"$binary" man "dist/$name/man"
# One commit gives one archive.
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git log -1 --format=%ct)" -C dist -cf - "$name" | gzip -n >"dist/$name.tar.gz"
(cd dist && sha256sum "$name.tar.gz" >SHA256SUMS)
stat --printf '%n: %s bytes\n' "$binary" "dist/$name.tar.gz"
