#!/usr/bin/env python3
"""Puts a real group of the demo into docs/guide/what-grpo-is.md: `group.py PROGRAM`, or `group.py --check`.

The group is the first of the demo's first step that is about a picture and whose answers differ. It goes to docs/guide/group.json, its
picture to docs/guide/images/group.png. The script computes the advantages itself and fails if the run wrote others.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from made import ROOT, machine, main

PAGE = ROOT / "docs/guide/what-grpo-is.md"
RECORD = ROOT / "docs/guide/group.json"
PICTURE = ROOT / "docs/guide/images/group.png"
EPSILON = 1e-4


def advantages(rewards):
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    return mean, deviation, [(reward - mean) / (deviation + EPSILON) for reward in rewards]


def parts(record):
    rewards = [answer["reward"] for answer in record["answers"]]
    mean, deviation, computed = advantages(rewards)
    for answer, own in zip(record["answers"], computed):
        if abs(answer["advantage"] - own) > 1e-3:
            raise SystemExit(f"the run wrote the advantage {answer['advantage']}, by hand it is {own}")
    table = [f'<img src="images/group.png" alt="Picture of the question" width="168">', "", f"> {record['question']}", "",
             f"The right answer is *{record['truth']}*.", "", "| | answer | accuracy | format | reward | advantage |", "|---|---|---|---|---|---|"]
    for at, answer in enumerate(record["answers"], 1):
        table.append(f"| {at} | `{answer['completion']}` | {answer['accuracy']:g} | {answer['format']:g} | {answer['reward']:g} | {answer['advantage']:.2f} |")
    counts = sorted({reward: rewards.count(reward) for reward in rewards}.items(), reverse=True)
    squares = sum((reward - mean) ** 2 for reward in rewards)
    sums = [
        f"- mean = ({' + '.join(f'{count} × {reward:g}' for reward, count in counts)}) / {len(rewards)} = {mean:.4g}",
        f"- deviation = √(({' + '.join(f'{count} × {abs(reward - mean):.3g}²' for reward, count in counts)}) / {len(rewards) - 1})"
        f" = √({squares:.4g} / {len(rewards) - 1}) = {deviation:.4f}",
    ]
    for reward, _ in counts:
        sums.append(f"- advantage of an answer that earned {reward:g} = ({reward:g} − {mean:.4g}) / ({deviation:.4f} + 0.0001) = "
                    f"{(reward - mean) / (deviation + EPSILON):.2f}")
    return {"group: tools/book/group.py": "\n".join(table), "sums: tools/book/group.py": "\n".join(sums)}


def measured(program):
    """Returns the record: the group of a run of one step."""
    scratch = Path(tempfile.mkdtemp())
    try:
        subprocess.run([program, "demo", "--max_steps", "1", "--output_dir", scratch / "demo"], capture_output=True, check=True)
        groups = {}
        for line in (scratch / "demo/rollouts/step-000001.jsonl").read_text().splitlines():
            answer = json.loads(line)
            groups.setdefault(answer["group"], []).append(answer)
        chosen = next(group for group in groups.values() if group[0]["media"][0].endswith(".png") and len({own["reward"] for own in group}) > 1)
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(chosen[0]["media"][0], PICTURE)
    finally:
        shutil.rmtree(scratch)
    return {
        **machine("python3 tools/book/group.py PROGRAM"),
        "question": chosen[0]["row"]["conversations"][0]["value"].removeprefix("<image>\n"), "truth": chosen[0]["row"]["answer"],
        "answers": [{"completion": own["completion"], **own["rewards"], "reward": own["reward"], "advantage": own["advantage"]} for own in chosen],
    }


if __name__ == "__main__":
    sys.exit(main(PAGE, RECORD, parts, measured))
