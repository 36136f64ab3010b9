"""Prints the metrics of a run that the rules of `omnigrpo_train::RULES` read, as the tests in crates/train/tests/run/healthy.rs take them.

    python3 tools/watch/healthy.py runs/demo "accuracy 0 1 1, format 0 1 0.1" > crates/train/tests/run/healthy/demo.csv

A reward without a stated range has the ends `-inf` and `inf`. Where the metrics lack the extremes of the rewards, the rollouts give them.
"""

import json
import sys
from pathlib import Path

NAMES = [
    "reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "grad_norm", "clip_ratio/region_mean", "completions/clipped_ratio",
    "completions/mean_length", "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max", "reward/min",
    "reward/max", "completions/count", "reward/length_correlation",
]

run, rewards = Path(sys.argv[1]), sys.argv[2]
rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
rows = [row for row in rows if not any(name.startswith("eval_") for name in row)]
for row in rows:
    path = run / f"rollouts/step-{row['step']:06}.jsonl"
    if "reward/min" not in row and path.exists():
        records = [json.loads(line) for line in path.read_text().splitlines()]
        given = {"reward": [own["reward"] for own in records]}
        given |= {f"rewards/{name}": [own["rewards"][name] for own in records] for name in records[0]["rewards"]}
        for name, values in given.items():
            values = [value for value in values if value is not None]
            if values:
                row |= {f"{name}/min": min(values), f"{name}/max": max(values)}
        row["completions/count"] = len(records)
names = NAMES + [name for name in rows[0] if name.startswith("rewards/") and name.endswith(("/mean", "/std", "/min", "/max"))]
print(f"# {run.name}: {rewards}")
print(",".join(names))
for row in rows:
    print(",".join("" if row.get(name) is None else f"{row[name]:.3g}" for name in names))
