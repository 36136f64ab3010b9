"""Answers to the calls of a run: rewards, steps, lines, progress."""

import json
import re

from ._progress import Progress
from ._reward import _asked, _Log  # One reading of TRL's signature, for functions of files and for those of this process.
from ._rows import dumps


def reward_names(functions):
    """Return the rewards as settings name them, and the functions of Python by name."""
    own, names = {}, []
    for function in functions if isinstance(functions, (list, tuple)) else [functions]:
        if isinstance(function, str):
            names.append(function)
        elif callable(function) and not hasattr(function, "forward"):
            called = getattr(function, "__name__", type(function).__name__)
            called = re.sub(r"\W", "", called, flags=re.ASCII) or "reward"
            name = next(n for n in (called, *(f"{called}_{i}" for i in range(2, 10_000))) if n not in own)
            own[name] = function
            names.append(f"caller:{name}")
        else:
            raise TypeError(f"a reward is a {type(function).__name__}, expected a function or the name of a reward; "
                            "give a reward model by its directory")
    return names, own


class Calls:
    """Answers the calls of a command, on the thread that started it."""

    def __init__(self, rewards, progress=None):
        self.rewards, self.progress = rewards, progress or Progress(off=True)

    def __call__(self, kind, name, data):
        answer = getattr(self, f"on_{kind}")(name, json.loads(data))
        return None if answer is None else dumps(answer)

    def on_score(self, name, batch):
        log, names = _Log(), ("completion", "completion_ids", "sample", "truncated")
        rows = [{**batch["prompts"][prompt], **dict(zip(names, own))} for prompt, *own in batch["completions"]]
        values = _asked(self.rewards[name], rows, False, log)
        return {"rewards": [None if value is None else float(value) for value in values], **log.answer()}

    def on_step(self, _, report):
        return True

    def on_save(self, _, report):
        pass

    on_evaluation = on_save

    def on_line(self, _, line):
        # The rest is in log.txt of the run.
        if line.startswith("warning") or any(word in line for word in ("http://", "omnigrpo watch", "interrupt")):
            self.progress.line(line)

    def on_doing(self, _, state):
        self.progress.show(state)
