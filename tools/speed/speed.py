#!/usr/bin/env python3
"""Compares the time of a step with the time of a fixed matrix product in the same run, and fails when a step has become slower.

    python3 tools/speed/speed.py target/release/omnigrpo                     # compares with reference.json
    python3 tools/speed/speed.py target/release/omnigrpo --record            # replaces the entry of this CPU

The product is numpy's, with as many threads as the program, before and after each run of `omnigrpo bench`. A step is stated in
products: its time divided by the time of the faster neighbour. The best of several runs counts, since other work on the machine
only slows down. An entry holds for one kind of CPU and number of threads; on another machine the script says that nothing was
compared and ends with status 3.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

REFERENCE = pathlib.Path(__file__).with_name("reference.json")
# A loss of this share fails.
ALLOWED = 0.15
SIDE = 1536
# Short sides, so that a run takes seconds: (name, flags of `bench`).
WORKLOADS = {
    "image": ["--num_images", "1", "--prompt_tokens", "64", "--completion_tokens", "32", "--num_generations", "8"],
    "text": ["--num_images", "0", "--prompt_tokens", "256", "--completion_tokens", "64", "--num_generations", "4"],
}


def cpu(threads):
    """The kind of this CPU, as /proc/cpuinfo states it, and the number of threads."""
    fields = {}
    for line in pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    vectors = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in fields.get("flags", "").split()]
    kind = " ".join([fields.get("vendor_id", "?"), fields.get("cpu family", "?"), fields.get("model", "?"), *vectors])
    return f"{kind}, {threads} threads"


def product(numpy, factors):
    """Seconds of one product, the best of five."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        numpy.matmul(*factors)
        best = min(best, time.perf_counter() - start)
    return best


def measure(binary, flags, threads, runs, steps, numpy, factors):
    """Time of a step in products, the best of `runs`."""
    best = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "bench.json")
        before = product(numpy, factors)
        for _ in range(runs):
            command = [binary, "bench", *flags, "--num_steps", str(steps), "--threads", str(threads), "--json", str(out)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            after = product(numpy, factors)
            best = min(best, min(json.loads(out.read_text())["steps_secs"]) / min(before, after))
            before = after
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--record", action="store_true", help="store the results as the reference of this CPU")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a run")
    parser.add_argument("--slowed", type=float, default=1.0, help="factor on the measured times, to see the check fail")
    args = parser.parse_args()

    threads = len(os.sched_getaffinity(0))
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    import numpy  # After the number of threads is set.

    numbers = numpy.random.default_rng(0)
    factors = [numbers.standard_normal((SIDE, SIDE), dtype=numpy.float32) for _ in range(2)]
    got = {}
    for name, flags in WORKLOADS.items():
        got[name] = args.slowed * measure(args.binary, flags, threads, args.runs, args.steps, numpy, factors)
        print(f"{name}: a step takes the time of {got[name]:.2f} products of {SIDE} x {SIDE} numbers")

    known = json.loads(REFERENCE.read_text()) if REFERENCE.exists() else {}
    key = cpu(threads)
    if args.record:
        known[key] = {name: round(value, 3) for name, value in got.items()}
        REFERENCE.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
        return 0
    if key not in known:
        print(f"NOTICE: no speed was compared: {REFERENCE.name} has no entry for {key}")
        return 3
    slow = {name: value / known[key][name] for name, value in got.items() if value > (1 + ALLOWED) * known[key][name]}
    for name, ratio in slow.items():
        print(f"{name}: {ratio:.2f} times the recorded {known[key][name]:.2f}; at most {1 + ALLOWED:.2f} is allowed", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
