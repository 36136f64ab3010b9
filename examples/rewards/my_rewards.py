"""Reward functions as TRL wants them: `--reward_funcs examples/rewards/my_rewards.py:right_and_short`."""

import re


def right_and_short(prompts, completions, solution, **columns):
    """1 for the right answer, half of it when the completion is long; not applicable without a solution."""
    scores = []
    for completion, gold in zip(completions, solution):
        if gold is None:
            scores.append(None)
            continue
        text = completion[0]["content"]
        answer = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
        right = answer is not None and answer.group(1).strip().lower() == gold.strip().lower()
        scores.append(right * (1.0 if len(text) < 400 else 0.5))
    return scores
