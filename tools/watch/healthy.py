"""Prints the metrics of a run that the rules of `omnigrpo_observe::RULES` read, as the tests in crates/observe/tests/health.rs take them.

    python3 tools/watch/healthy.py runs/demo "accuracy 0 1 1, format 0 1 0.1" > crates/train/tests/run/healthy/demo.csv
"""

import json
import sys
from pathlib import Path

NAMES = [
    "reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "grad_norm", "clip_ratio/region_mean", "completions/clipped_ratio",
    "completions/mean_length", "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
]

run, rewards = Path(sys.argv[1]), sys.argv[2]
rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
rows = [row for row in rows if not any(name.startswith("eval_") for name in row)]
names = NAMES + [name for name in rows[0] if name.startswith("rewards/") and name.endswith(("/mean", "/std"))]
print(f"# {run.name}: {rewards}")
print(",".join(names))
for row in rows:
    print(",".join("" if row.get(name) is None else f"{row[name]:.3g}" for name in names))
