"""Measures what Python adds to a run: `python overhead.py` prints it, and fails above the limits.

- The reward phase of a step, with a function that returns at once: at most 1 ms and 10 µs a completion, less the time in the function.
- The report of a step to Python, with every number of the step: at most 0.2 ms.
- Questions to a model in memory: at most 2 % of the time of the same questions in the module of Rust.

Each is the median of several steps or questions. On a busy machine, the smallest value is nearer to the cost.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import omnigrpo
from omnigrpo import _calls

PROMPTS, SAMPLES, STEPS, FIRST = 8, 8, 25, 5


class Timed:
    """Calls a function, and keeps the time of each call in seconds."""

    def __init__(self, function):
        self.function, self.times = function, []

    def __call__(self, *arguments, **keywords):
        start = time.perf_counter()
        try:
            return self.function(*arguments, **keywords)
        finally:
            self.times.append(time.perf_counter() - start)


def rewards_and_steps(folder):
    """Return the cost of each reward phase and of each report, s."""
    inside = Timed(lambda completions: [float(i % 2) for i in range(len(completions))])
    reports, answer = [], _calls.Calls.__call__

    def timed(calls, kind, name, data):
        call = Timed(answer)
        try:
            return call(calls, kind, name, data)
        finally:
            reports.extend(call.times if kind == "step" else [])

    _calls.Calls.__call__ = timed
    args = omnigrpo.GRPOConfig(
        folder / "run", per_device_train_batch_size=PROMPTS, gradient_accumulation_steps=1, num_generations=SAMPLES,
        max_completion_length=12, dtype="float32", max_steps=FIRST + STEPS, learning_rate=1e-4,
    )
    empty = lambda completions, **kwargs: inside(completions)  # noqa: E731
    omnigrpo.GRPOTrainer(folder / "model", empty, args, folder / "data/train.jsonl").train()
    _calls.Calls.__call__ = answer
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    phases = [row["time/reward"] for row in rows if "time/reward" in row]
    # The first call is the trial before the run.
    return [phase - own for phase, own in zip(phases, inside.times[1:])][FIRST:], reports[FIRST:]


def questions(folder):
    """Return the share of the time of questions that Python takes."""
    model = omnigrpo.Model.load(folder / "model", dtype="float32")
    shares = []
    for _ in range(5):
        inner = Timed(model._inner.generate)
        model._inner = type("Inner", (), {"generate": staticmethod(inner)})
        whole = Timed(model.generate)
        whole([f"Which colour is {i}?" for i in range(64)], max_completion_length=12, temperature=0)
        model._inner = type("Inner", (), {"generate": staticmethod(inner.function)})
        shares.append(whole.times[0] / inner.times[0] - 1)
    return shares


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        omnigrpo.write_demo(folder, train=256, eval=1)
        phases, reports = rewards_and_steps(folder)
        shares = questions(folder)
    failed = False
    for name, values, scale, unit, most in (
        (f"reward of {PROMPTS * SAMPLES} completions", phases, 1e3, "ms", 1 + PROMPTS * SAMPLES * 0.01),
        ("report of a step", reports, 1e3, "ms", 0.2),
        ("64 questions", shares, 100, "%", 2),
    ):
        cost, least = (scale * value for value in (statistics.median(values), min(values)))
        print(f"{name}: {cost:.2f} {unit}, smallest {least:.2f} {unit}, at most {most:.2f} {unit}")
        failed |= cost > most
    sys.exit(failed)


if __name__ == "__main__":
    main()
