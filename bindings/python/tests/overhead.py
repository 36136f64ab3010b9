"""Measures the cost of a reward in this process: `python overhead.py` prints it, and fails above 1 ms + 10 µs a completion.

The cost is the median time of the scoring phase of a step, with a function that returns zeros, less the time in the function.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import omnigrpo

PROMPTS, SAMPLES, STEPS, FIRST = 8, 8, 25, 5


def main():
    inside = []

    def empty(completions, **kwargs):
        start = time.perf_counter()
        values = [float(i % 2) for i in range(len(completions))]
        inside.append(time.perf_counter() - start)
        return values

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        omnigrpo.write_demo(folder, train=256, eval=1)
        args = omnigrpo.GRPOConfig(
            folder / "run", per_device_train_batch_size=PROMPTS, gradient_accumulation_steps=1, num_generations=SAMPLES,
            max_completion_length=12, dtype="float32", max_steps=FIRST + STEPS, learning_rate=1e-4,
        )
        omnigrpo.GRPOTrainer(folder / "model", empty, args, folder / "data/train.jsonl").train()
        rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    times = [row["time/reward"] for row in rows if "time/reward" in row][FIRST:]
    cost, most = statistics.median(times) - statistics.median(inside), 1e-3 + PROMPTS * SAMPLES * 1e-5
    print(f"{PROMPTS * SAMPLES} completions: {1e3 * cost:.2f} ms, at most {1e3 * most:.2f} ms")
    sys.exit(cost > most)


if __name__ == "__main__":
    main()
