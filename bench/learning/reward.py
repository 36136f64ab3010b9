"""The reward function of both trainers, with TRL's interface."""

import re


def right(completions, solution, **_):
    """Returns 1 if the text in the answer tag equals the solution's, else 0."""
    def answer(text):
        found = re.findall(r"<answer>(.*?)</answer>", text, re.S)
        return found[-1].strip().lower() if found else None

    return [float(answer(c[0]["content"]) == answer(s)) for c, s in zip(completions, solution)]
