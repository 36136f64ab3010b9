#!/usr/bin/env python3
"""Makes a page of the results of run.py: `report.py results.jsonl > gpu-results.md`."""

import collections
import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
# The packed folder has both beside this file.
sys.path[:0] = [str(HERE), str(ROOT / "bench/gpu")]
import predict  # noqa: E402

STAGES = {
    "A": "Libraries, health and a kernel of each file",
    "B": "Tests of kernels and devices",
    "C": "NVIDIA's sanitizer",
    "D": "The same bits in two processes",
    "E": "Speed",
    "F": "Training steps compared with the CPU",
}


def models():
    packed = HERE / "models"
    return {model.name: model for model in predict.models(*([packed] if packed.exists() else []))}


def card(results):
    """Returns the name of the card, from the first line of doctor's check."""
    for result in results:
        for line in (result.get("output") or "").splitlines():
            if line.startswith("check of cuda:"):
                return line.split(maxsplit=3)[3]
    return "an unknown card"


def rates(results):
    """Returns the FLOP/s of products and the bytes/s of copies that doctor measured on this card, or those of an H100, and whose they are."""
    text = "\n".join(result.get("output") or "" for result in results if result["name"] == "what doctor says")
    found = [re.search(rf"^ +{name} +([0-9.]+) {unit}$", text, re.M) for name, unit in (("products, bf16", "TFLOP/s"), ("copy in its memory", "GB/s"))]
    if not all(rate and float(rate[1]) for rate in found):
        return predict.PRODUCTS, predict.COPY, "an H100"
    return float(found[0][1]) * 1e12, float(found[1][1]) * 1e9, "this card"


def speed(results, products, copy):
    """Returns the rows of the table of measurements, for a card with these rates."""
    known, rows = models(), []
    for result in results:
        of = result["is"]
        secs = of.get("secs", of.get("median_secs"))
        if secs is None:
            continue
        model = known.get(result["model"])
        least = max(of.get("flops", 0) / products, of.get("bytes", 0) / copy)
        guess = predict.predicted("now", model, result["what"], result["sizes"], of) if model else None
        estimate = f"{guess * 1e3:#.4g} ms" if guess else ""
        name = " ".join(filter(None, [result["what"], of.get("name", "").removeprefix("model.")]))
        share = f"{least / secs:.0%}" if least else ""
        counts = [(of.get("flops"), 1e12, "TFLOP/s"), (of.get("bytes"), 1e9, "GB/s")]
        reached = ", ".join(f"{count / secs / unit:.4g} {name}" for count, unit, name in counts if count)
        rows.append(f"| {result['model']} | {name} | {of.get('rows', '')} | {secs * 1e3:.3f} | {reached} | {share} | {estimate} |")
    return rows


def page(results):
    begin = next((result for result in results if result["name"] == "begin"), {})
    text = [f"Run on {card(results)}, {begin.get('date', 'unknown date')}, commit {begin.get('commit', 'unknown')}.", "", "# GPU results"]
    if not results or results[-1]["name"] != "end":
        text += ["", "The run was cut off: later results are missing."]
    by_stage = collections.defaultdict(list)
    for result in results:
        by_stage[result["stage"]].append(result)
    for letter, title in STAGES.items():
        own = by_stage.get(letter)
        if not own:
            continue
        skipped = [result for result in own if "skipped" in result]
        failed = [result for result in own if not result["ok"] and "skipped" not in result]
        checks = [result for result in own if result["name"] != "measured" and result not in skipped]
        text += ["", f"## {title}", "", f"{len(checks) - len(failed)} of {len(checks)} passed; {len(skipped)} were skipped."]
        for result in failed:
            text += ["", f"**{result['name']} failed** ({result.get('ended_with', '')}):", "", "```", result.get("output", "").strip(), "```"]
        for why in sorted({result["skipped"] for result in skipped}):
            text += ["", f"Skipped: {why}."]
        for result in own:
            if result["name"] in ("what doctor says", "what ncu says"):
                text += ["", "```", result["output"].strip(), "```"]
        measured = [result for result in own if result["name"] == "measured"]
        if measured:
            products, copy, whose = rates(results)
            text += [
                "",
                f"The lower bound is the time of the products at {products / 1e12:.4g} TFLOP/s or of the bytes at {copy / 1e9:.4g} GB/s, the rates of {whose}.",
                "",
                "| model | | rows | ms | reached | lower bound / time | predicted for an H100 |",
                "|---|---|---|---|---|---|---|",
                *speed(measured, products, copy),
            ]
    return "\n".join(text) + "\n"


def read(text):
    """Returns the results of a file. The last line of a run that was cut off may be incomplete."""
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


def main():
    sys.stdout.write(page(read(pathlib.Path(sys.argv[1]).read_text())))


if __name__ == "__main__":
    main()
