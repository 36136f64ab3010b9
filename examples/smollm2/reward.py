"""The reward of this example."""

import re


def exact(completions, solution, **columns):
    """1 if the last number of the completion is the solution."""
    scores = []
    for completion, gold in zip(completions, solution):
        text = completion if isinstance(completion, str) else completion[0]["content"]
        numbers = re.findall(r"-?\d+", text)
        scores.append(1.0 if numbers and numbers[-1] == str(gold) else 0.0)
    return scores
