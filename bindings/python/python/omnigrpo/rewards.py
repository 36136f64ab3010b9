"""Rewards by TRL's names.

    from omnigrpo.rewards import accuracy_reward

A reward of the program is its name, so `reward_funcs=accuracy_reward` needs no packages and runs outside of Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: 1 if the answer equals the column `solution` as a number or a formula, else 0.
accuracy_reward: str = "math"
#: The same: thinking in the answer does not count.
reasoning_accuracy_reward: str = "math"
#: 1 if the completion begins with one block `<think>…</think>`, else 0.
think_format_reward: str = "think_format"


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """Return a reward that is 0 for completions of up to `max_completion_len - soft_punish_cache` tokens, and from there falls evenly to
    -1 at `max_completion_len` tokens. Source: DAPO, arXiv 2503.14476, equation 13.
    """
    if not 0 < soft_punish_cache <= max_completion_len:
        raise ValueError(f"soft_punish_cache is {soft_punish_cache}, expected a number of tokens from 1 to {max_completion_len}")

    def soft_overlong_punishment(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        over = [len(ids) - (max_completion_len - soft_punish_cache) for ids in completion_ids]
        return [-min(1.0, max(0, tokens) / soft_punish_cache) for tokens in over]

    soft_overlong_punishment.range = (-1, 0)  # type: ignore[attr-defined]
    return soft_overlong_punishment
