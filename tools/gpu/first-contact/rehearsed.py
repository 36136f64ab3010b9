#!/usr/bin/env python3
"""Checks a rehearsal on the stand-in: all stages and tests ran and passed, and the page shows them.

    rehearsed.py FOLDER REPORTS SANITIZED

FOLDER is the unpacked kit after a complete run with `--tiny`. REPORTS and SANITIZED have the stand-in's reports of processes alone
and of processes under the sanitizer.
"""

import json
import pathlib
import re
import subprocess
import sys

import report
import run

TOOLS = ["memcheck", "initcheck", "racecheck", "synccheck"]
MEASURED = [
    "product", "product, backward", "product of a tower", "attention", "attention, backward", "prefill", "decode", "decode, launched one by one", "policy", "optimizer",
    "optimizer, offloaded",
]  # fmt: skip
# Words in doctor's check that the page shows.
DOCTOR = ["libnvrtc", "libcublasLt", "driver", "memory errors", "clocks", "relative error", "GB/s", "TFLOP/s"]


def wanted(tests):
    """Returns the stage and the name of each result of a complete run with these tests of each suite."""
    names = {("A", "doctor --gpu"), ("A", "what doctor says"), ("D", "two processes give the same bits"), ("E", "what ncu says"), ("E", run.PUBLISHED)}
    names |= {("F", "turns on the CPU"), ("-", "begin"), ("-", "end")}
    for family in [*run.FAMILIES, f"{run.FAMILIES[0]} with turns"]:
        names |= {("F", f"metrics of the card, {family}"), ("F", f"steps on the card equal the CPU's, {family}")}
    # A rehearsal has no time for the slow ones.
    quick = {suite: [name for name in all_ if not any(part in name for part in ("planted", "slow_", run.LARGE))] for suite, all_ in tests.items()}
    names |= {("B", f"{suite}::{name}") for suite, all_ in quick.items() for name in all_}
    names |= {("C", name) for tool in TOOLS for name in (tool, *(f"{tool}: {test}" for test in run.SMALL))}
    return names


def problems(results, page, tests, reports, sanitized):
    """Yields what is wrong with a run. `tests` are the names of all tests of each suite."""
    for result in results:
        if not result["ok"]:
            why = result.get("skipped") or f"{result.get('ended_with', '')}\n{result.get('output', '')}"
            yield f"stage {result['stage']}, {result['name']}: failed: {why}".rstrip()
    names = {(result["stage"], result["name"]) for result in results}
    for stage, name in sorted(wanted(tests) - names):
        yield f"stage {stage}, {name}: missing"
    for what in set(MEASURED) - {result.get("what") for result in results}:
        yield f"stage E, {what}: not measured"
    if not page.startswith("Run on Stand-in GPU, ") or "cut off" in page or " failed" in page:
        yield "the page does not show a complete run on the stand-in"
    for letter, title in report.STAGES.items():
        count = sum(result["stage"] == letter and result["name"] != "measured" for result in results)
        if f"## {title}\n\n{count} of {count} passed; 0 were skipped." not in page:
            yield f"the page does not show that all {count} checks of stage {letter} passed"
    for what in MEASURED:
        # A product has the name of its weight, too.
        if not re.search(rf"\| {what}( [^|,]*)? \|", page):
            yield f"the page does not show the measurement {what}"
    for part in [*DOCTOR, "the rates of this card", f"ncu profiles regex:{run.PROFILED}"]:
        if part not in page:
            yield f"the page does not show `{part}`"
    for complaint in (complaint for one in reports + sanitized for complaint in one["complaints"]):
        yield f"the stand-in complains: {complaint}"
    launched, seen = ({kernel for one in all_ for kernel in one["kernels"]} for all_ in (reports, sanitized))
    for kernel in sorted(launched - seen):
        yield f"no test under the sanitizer launches {kernel}"


def main():
    folder, *places = map(pathlib.Path, sys.argv[1:])
    results = report.read((folder / "results.jsonl").read_text())
    reports, sanitized = ([json.loads(path.read_text()) for path in place.iterdir()] for place in places)
    tests = {}
    for suite in ("kernels", "devices"):
        listed = subprocess.run([folder / "tests" / suite, "--list"], stdout=subprocess.PIPE, text=True, check=True).stdout
        tests[suite] = [line.removesuffix(": test") for line in listed.splitlines() if line.endswith(": test")]
    found = list(problems(results, (folder / "gpu-results.md").read_text(), tests, reports, sanitized))
    print("\n".join(found) or f"{len(results)} results of {len(reports)} processes on the stand-in")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
