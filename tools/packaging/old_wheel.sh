#!/usr/bin/env bash
# Installs wheels of the Python package in minimal roots of old systems, where the program starts and the module trains: on x86-64
# Debian 11, with its own Python 3.9; on 64-bit ARM as well, in an emulator. Needs root, debootstrap, qemu-user-static and the
# network.
#
#     tools/packaging/old_wheel.sh WHEEL…     roots are kept in $ROOTS for the next time; target/roots by default
set -euo pipefail
cd "$(dirname "$0")/../.."

roots=${ROOTS:-${CARGO_TARGET_DIR:-target}/roots}
mkdir -p "$roots"
for wheel in "$@"; do
    case $wheel in
    *_x86_64.whl) architecture=amd64 ;;
    *_aarch64.whl) architecture=arm64 ;;
    *) echo "$wheel is for no known architecture" >&2; exit 1 ;;
    esac
    # The kernel gives programs of another architecture to the emulator.
    [[ $architecture == "$(dpkg --print-architecture)" || -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ]] || {
        [[ -e /proc/sys/fs/binfmt_misc/register ]] || mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
        update-binfmts --enable qemu-aarch64
    }
    root=$roots/python-$architecture
    # The name appears when the root is complete.
    if [[ ! -d $root ]]; then
        rm -rf "$root.new"
        debootstrap --variant=minbase --include=python3-venv --arch="$architecture" bullseye "$root.new" >"$root.log" ||
            { tail -5 "$root.log" >&2; exit 1; }
        mv "$root.new" "$root"
    fi
    rm -rf "$root/try"
    mkdir "$root/try"
    cp "$wheel" "$root/try/"
    cat >"$root/try/try.sh" <<'EOF'
set -e
cd /try
python3 -m venv environment
environment/bin/pip install --quiet --no-index --disable-pip-version-check ./*.whl
environment/bin/omnigrpo --version
environment/bin/python - <<'CODE'
import omnigrpo
omnigrpo.write_demo("demo", train=8, eval=1)
args = omnigrpo.GRPOConfig("own", num_generations=2, per_device_train_batch_size=2, gradient_accumulation_steps=1, max_completion_length=4,
                           max_steps=1)
done = omnigrpo.GRPOTrainer("demo/model", lambda completions, **_: [float(i) for i in range(len(completions))], args,
                            "demo/data/train.jsonl").train()
assert done.global_step == 1, done
CODE
# This command leaves out the demo's evaluations, which take long in an emulator.
environment/bin/omnigrpo train --model demo/model --train_file demo/data/train.jsonl --reward_funcs random --num_generations 2 \
    --gradient_accumulation_steps 1 --max_completion_length 4 --max_steps 1 --output_dir run
test -s run/model.safetensors
EOF
    chroot "$root" /bin/sh /try/try.sh >"$root/try/said.txt" 2>&1 || { cat "$root/try/said.txt" >&2; exit 1; }
    echo "$(basename "$wheel") works on Debian $(cat "$root/etc/debian_version"), $architecture, $(chroot "$root" python3 --version)"
done
