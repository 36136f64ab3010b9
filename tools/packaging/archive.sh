#!/usr/bin/env bash
# Builds what a release hands out: dist/omnigrpo-VERSION-x86_64-unknown-linux-gnu.tar.gz with the program, completions for
# bash, zsh and fish, man pages, README and licence; and dist/SHA256SUMS.
#
#     tools/packaging/archive.sh 0.1.0
set -euo pipefail
cd "$(dirname "$0")/../.."

version=${1:?usage: tools/packaging/archive.sh VERSION}
stated=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
[[ $version == "$stated" ]] || { echo "the release is $version, Cargo.toml says $stated" >&2; exit 1; }
name=omnigrpo-$version-x86_64-unknown-linux-gnu
binary=${CARGO_TARGET_DIR:-target}/dist/omnigrpo

cargo build --locked --profile dist --package omnigrpo
rm -rf "dist/$name"
mkdir -p "dist/$name/completions" "dist/$name/man"
cp "$binary" README.md LICENSE "dist/$name/"
for shell in bash zsh fish; do
    "$binary" completions "$shell" >"dist/$name/completions/omnigrpo.$shell"
done
"$binary" man "dist/$name/man"
# The same bytes for the same commit.
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git log -1 --format=%ct)" -C dist -cf - "$name" | gzip -n >"dist/$name.tar.gz"
(cd dist && sha256sum "$name.tar.gz" >SHA256SUMS)
stat --printf '%n: %s bytes\n' "$binary" "dist/$name.tar.gz"
