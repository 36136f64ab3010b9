#!/usr/bin/env bash
# Starts the program of dist/omnigrpo-VERSION-x86_64-unknown-linux-gnu.tar.gz in minimal roots of Debian 11 and 12: it says its
# version and describes the machine. Needs root, debootstrap and the network.
#
#     tools/packaging/old_systems.sh 0.3.0 [FOLDER]     FOLDER keeps the roots for the next time; target/roots by default
set -euo pipefail
cd "$(dirname "$0")/../.."

version=${1:?usage: tools/packaging/old_systems.sh VERSION [FOLDER]}
folder=${2:-${CARGO_TARGET_DIR:-target}/roots}
archive=dist/omnigrpo-$version-x86_64-unknown-linux-gnu
mkdir -p "$folder"
for system in bullseye bookworm; do
    root=$folder/$system
    # The name appears when the root is complete.
    if [[ ! -d $root ]]; then
        rm -rf "$root.new"
        debootstrap --variant=minbase "$system" "$root.new" >"$folder/$system.log" || { tail -5 "$folder/$system.log" >&2; exit 1; }
        mv "$root.new" "$root"
    fi
    rm -rf "$root/omnigrpo"
    mkdir "$root/omnigrpo"
    tar -xzf "$archive.tar.gz" -C "$root/omnigrpo" --strip-components=1
    said=$(chroot "$root" /omnigrpo/omnigrpo --version)
    [[ $said == *"$version"* ]] || { echo "$system: \`--version\` said \"$said\", expected $version" >&2; exit 1; }
    chroot "$root" /omnigrpo/omnigrpo doctor >"$folder/$system-doctor.txt" || { cat "$folder/$system-doctor.txt" >&2; exit 1; }
    chroot "$root" /omnigrpo/omnigrpo demo --max_steps 1 --output_dir /omnigrpo/run >/dev/null
    [[ -s $root/omnigrpo/run/model.safetensors ]] || { echo "$system: the demo left no model" >&2; exit 1; }
    echo "$system ($(chroot "$root" ldd --version | head -1)): $said, doctor and one step of the demo work"
done
