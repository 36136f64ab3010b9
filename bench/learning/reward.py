"""The reward of both trainers, as TRL takes it."""

import re


def right(completions, solution, **_):
    """1 where the text in the answer tag is the solution's."""
    def answer(text):
        found = re.findall(r"<answer>(.*?)</answer>", text, re.S)
        return found[-1].strip().lower() if found else None

    return [float(answer(c[0]["content"]) == answer(s)) for c, s in zip(completions, solution)]
