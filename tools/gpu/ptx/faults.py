#!/usr/bin/env python3
"""Plants faults in the kernels, builds their PTX with checks, and expects the named tests to fail as the fault says.

    faults.py OUT TESTS [WORD…]     OUT is where `build OUT --race` builds the kernels without faults, TESTS the program of
                                    crates/gpu/tests/kernels; with words, only faults whose description has one of them

These are kinds of faults that the emulator of crates/gpu cannot see; it has a list of its own in crates/gpu/tests/kernels/faults.rs.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CUDA = HERE.parents[2] / "crates/gpu/cuda"
# The tests of a fault take seconds. A fault that makes them wait forever says so in `shows`.
LIMIT_SECS = 300
NO_END = f"no end after {LIMIT_SECS} s"


@dataclass
class Fault:
    what: str
    # The file of kernels that is compiled anew.
    file: str
    before: str
    after: str
    tests: str
    # Pattern of what the output of the tests shows.
    shows: str
    # Whether the text is in prim.cuh, not in the file.
    of_prim: bool = False


OF_BLOCK = "i64 begin = blockIdx.x * per_block, end = begin + per_block < n ? begin + per_block : n;"
NO_WAIT = "has not waited for"
STEP = "step::kernels_of_a_step_wait_for_those_before_them"
EARLY = "that a launch before this one may still access"
FAULTS = [
    Fault(
        "operands of cvt.rn.bf16x2 swapped",
        "norms",
        '"f"(hi), "f"(lo)',
        '"f"(lo), "f"(hi)',
        "norms",
        "Bf16, result",
        of_prim=True,
    ),
    Fault(
        "no .trans in ldmatrix", "attention", "x4.trans.shared", "x4.shared", "attention_in_windows", "log-sum-exp", of_prim=True
    ),
    Fault(
        "cp.async.wait_group of one group less",
        "attention",
        '"n"(NEWEST)',
        '"n"(NEWEST + 1)',
        "attention_in_windows",
        NO_WAIT,
        of_prim=True,
    ),
    Fault(
        "blocks add to one place",
        "sums",
        "partial[(i64)blockIdx.y * cols + j] = sum;",
        "if (blockIdx.y) { partial[j] += sum; partial[(i64)blockIdx.y * cols + j] = 0; } else partial[j] = sum;",
        "sums",
        r"that block \d+, warp \d+, thread \d+ wrote",
    ),
    Fault(
        "attention needs more shared memory than the host asks for",
        "attention",
        "constexpr int LINE = PADDED<D> + 8",
        "constexpr int LINE = PADDED<D> + 16",
        "attention_in_windows",
        r"in shared memory, of which the launch has \d+",
    ),
    Fault(
        "few rows need more shared memory than the host asks for",
        "linear",
        "X_LINE = DEPTH<BITS> + 8",
        "X_LINE = DEPTH<BITS> + 16",
        "edges::sums_that_use_each_stage_again",
        r"in shared memory, of which the launch has \d+",
    ),
    Fault(
        "vectors at any address", "elementwise", " || at % (a.bf16 ? 8 : 16)", "", "elements", "not a multiple of", of_prim=True
    ),
    Fault(
        "rows beyond 2^31 elements",
        "norms",
        "(i64)blockIdx.x * dim",
        "(int)(blockIdx.x * dim)",
        "edges::more_than_2_31_elements",
        "belongs to no array",
    ),
    Fault(
        "NaN logits are left out of the sum",
        "head",
        "        s += e;\n",
        "        if (x != x) continue;\n        s += e;\n",
        "edges::nan_is_never_hidden",
        "score, .* is NaN",
    ),
    Fault(
        "dot products in f32",
        "sums",
        f"SHARED(double, red, 32);\n    {OF_BLOCK}\n    double sum = 0;",
        f"SHARED(float, red, 32);\n    {OF_BLOCK}\n    float sum = 0;",
        "edges::squares_are_summed_in_f64",
        "left: 1684",
    ),
    Fault(
        "accumulators start undefined",
        "linear",
        "float acc[BLOCKS][4] = {};",
        "float acc[BLOCKS][4];",
        "a_row_has_the_same_bits_in_every_batch",
        "not a number",
    ),
    Fault(
        "a barrier that only threads with columns reach",
        "norms",
        "float r = 1 / sqrt_(block_sum(squares, red) / dim + eps);",
        "float r = 0; if (threadIdx.x * 4 < dim) r = 1 / sqrt_(block_sum(squares, red) / dim + eps);",
        "norms",
        "threads wait at different barriers|after some of its threads have ended",
    ),
    Fault(
        "a row of the next tile is stored",
        "attention",
        "if (row + g + 8 < end)",
        "if (row + g + 8 <= end)",
        "attention_with_shared_prefixes",
        r"that block \d+, warp \d+, thread \d+ wrote|belongs to no array",
    ),
    Fault("one group of copies too few", "attention", "wait_copies<0>", "wait_copies<1>", "attention_in_windows", NO_WAIT),
    Fault(
        "one group of copies too few in decoding",
        "attention",
        "wait_copies<STAGES - 1>",
        "wait_copies<STAGES>",
        "decoding_of_every_group_size",
        NO_WAIT,
    ),
    Fault(
        "one stage of a product too few",
        "linear",
        "wait_copies<STAGES - 2>",
        "wait_copies<STAGES - 1>",
        "edges::sums_that_use_each_stage_again",
        NO_WAIT,
    ),
    Fault(
        "sums take the place of a stage that others read",
        "linear",
        "float* sums = (float*)shared;\n        sync_block();",
        "float* sums = (float*)shared;",
        "swiglu_of_few_rows_has_the_bits_of_two_kernels",
        "without a barrier between them",
    ),
    Fault(
        "statistics need more shared memory than the host asks for",
        "attention",
        "stats = (float*)(sd + 2 * STAGE)",
        "stats = (float*)(sd + 2 * STAGE) + 8",
        "attention_in_windows",
        r"in shared memory, of which the launch has \d+",
    ),
    Fault(
        "statistics are not written before they are read",
        "attention",
        "if (threadIdx.x < 2 * Q) stats[",
        "if (threadIdx.x < Q) stats[",
        "attention_in_windows",
        "nothing has written|without a barrier between them",
    ),
    Fault(
        "no barrier before sums of warps are read",
        "norms",
        "red[threadIdx.x / 32] = x;\n    sync_block();\n    T sum",
        "red[threadIdx.x / 32] = x;\n    T sum",
        "norms",
        "without a barrier between them|nothing has written",
        of_prim=True,
    ),
    Fault(
        "padding rows join undefined parts",
        "attention",
        "(it.prompt_rows + SPLIT - 1) / SPLIT, PART, column",
        "prompt_parts, PART, column",
        "edges::padded_decoding",
        "read of global memory that nothing has written",
    ),
    Fault(
        "a token is drawn from a row of NaN",
        "sample",
        "if (!(lse[blockIdx.x] < INFINITY) || top == -INFINITY)",
        "if (top == -INFINITY)",
        "edges::draws_from_nan",
        "left: [1-9]|draws_from_nan .* FAILED",
    ),
    Fault(
        "a product reads its input before it waits",
        "linear",
        "    wait_previous();\n    // The first",
        "    if (*(const u32*)from_x == 0x7fc17fc1u) return;\n    wait_previous();\n    // The first",
        STEP,
        EARLY,
    ),
    Fault(
        "attention to a completion starts before its rows are complete",
        "attention",
        "wait_previous(), start_next();",
        "start_next(), wait_previous();",
        STEP,
        EARLY,
    ),
    Fault(
        "attention joins parts before it waits",
        "attention",
        "    wait_previous();\n    if (!finishes_last(",
        "    if (partial[0] == 1e38f) return;\n    wait_previous();\n    if (!finishes_last(",
        STEP,
        EARLY,
    ),
    Fault(
        "a norm reads rows before it waits",
        "norms",
        "start_next(), wait_previous();\n    SHARED(float, red, 32);",
        "start_next();\n    if (load(x, (i64)blockIdx.x * dim) == 1e38f) return;\n    wait_previous();\n    SHARED(float, red, 32);",
        STEP,
        EARLY,
    ),
    Fault(
        "a draw reads logits before it waits",
        "sample",
        "start_next(), wait_previous();",
        "start_next();\n    if (logits[0] == 1e38f) return;\n    wait_previous();",
        STEP,
        EARLY,
    ),
    Fault(
        "NaN is rounded to a zero",
        "elementwise",
        "if (v.x[e] != v.x[e]) top = 0x7fffu, whole = 0x7fff0000u;",
        "",
        "edges::nan_is_never_hidden",
        "adamw of a weight in two halves, .* is -?0",
    ),
]


def planted(fault, text):
    """Returns the text of the file with the fault. That of prim.cuh is written into it, so that no other file changes."""
    prim = (CUDA / "prim.cuh").read_text()
    changed = (prim if fault.of_prim else text).replace(fault.before, fault.after)
    if changed == (prim if fault.of_prim else text):
        raise SystemExit(f"{fault.what}: the text is not there: {fault.before!r}")
    text = text.replace('#include "prim.cuh"', changed.replace("#pragma once\n", "")) if fault.of_prim else changed
    # Two of the widths of heads are tested, and compile in half the time.
    return text.replace("OF_WIDTH(80)\nOF_WIDTH(128)\nOF_SMALL_BLOCKS(128)\n", "")


def failure(fault, out, tests):
    """Returns the output of the tests if they fail or do not end with the fault, else None."""
    with tempfile.TemporaryDirectory() as folder:
        sources, built = Path(folder, "cuda"), Path(folder, "out")
        # Times are kept, so that only the changed file is compiled.
        shutil.copytree(CUDA, sources)
        shutil.copytree(out, built)
        source = sources / f"{fault.file}.cu"
        source.write_text(planted(fault, source.read_text()))
        if subprocess.run([HERE / "build", built, "--race"], env={**os.environ, "SOURCES": str(sources)}).returncode:
            raise SystemExit(f"{fault.what}: the kernels cannot be built with this fault")
        environment = {**os.environ, "OMNIGRPO_TEST_KERNELS": str(built / "kernels-race.so")}
        command = [tests, *fault.tests.split(), "--exact", "--test-threads=1"]
        try:
            run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECS)
        except subprocess.TimeoutExpired as expired:
            return f"{(expired.stdout or b'').decode(errors='replace')}\n{NO_END}"
        if "running 0 tests" in run.stdout:
            raise SystemExit(f"{fault.what}: {tests} has no test {fault.tests}")
        return run.stdout + run.stderr if run.returncode else None


def main(out, tests, words):
    missed = 0
    subprocess.run([HERE / "build", out, "--race"], check=True)
    for fault in FAULTS:
        if words and not any(word in fault.what for word in words):
            continue
        start = time.monotonic()
        output = failure(fault, out, tests)
        shown = output and re.search(fault.shows, output)
        result = f"found: {shown[0]}" if shown else "MISSED" if output is None else f"FOUND OTHERWISE\n{output[-3000:]}"
        missed += not shown
        print(f"{fault.file}: {fault.what}: {result} ({time.monotonic() - start:.0f} s)", flush=True)
    if missed:
        raise SystemExit(f"{missed} faults were missed, or found for another reason")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3:])
