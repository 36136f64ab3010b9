"""Answers to the calls of a run: rewards, tools, steps, lines, progress."""

import json
import re

from ._progress import Progress
from ._reward import Environments, _scores  # One reading of TRL's forms, for functions of files and for those of this process.
from ._rows import dumps


def with_functions(settings, reward_funcs, tools=None, environment_factory=None):
    """Return the settings with the names of functions of this process, the rewards among them by name, and the environments."""
    environments = Environments(tools, environment_factory)
    own, names = {}, []
    if reward_funcs is None:
        reward_funcs = [] if environments.rewards else "accuracy"
    for function in reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]:
        if isinstance(function, str):
            names.append(function)
        elif callable(function) and not hasattr(function, "forward"):
            called = re.sub(r"\W", "", getattr(function, "__name__", type(function).__name__), flags=re.ASCII) or "reward"
            name = next(n for n in (called, *(f"{called}_{i}" for i in range(2, 10_000))) if n not in own)
            own[name] = function
            names.append(f"caller:{name}")
        else:
            raise TypeError(f"a reward is a {type(function).__name__}, expected a function or the name of a reward; "
                            "give a reward model by its directory")
    settings = dict(settings)
    if environments.rewards and settings.get("reward_weights"):
        settings["reward_weights"] = [*settings["reward_weights"], *[1.0] * len(environments.rewards)]
    names += [f"caller:{name}" for name in environments.rewards]
    if names:
        settings["reward_funcs"] = names
    if environments.names:
        if settings.get("environment"):
            raise ValueError(f"the settings have the environment {settings['environment']!r} beside `tools` or `environment_factory`, "
                             "expected one of them")
        settings["environment"] = f"caller:{'+'.join(environments.names)}"
    return settings, {**own, **environments.rewards}, environments


class Calls:
    """Answers the calls of a command, on the thread that started it."""

    def __init__(self, rewards, environments, progress=None):
        self.rewards, self.environments, self.progress = rewards, environments, progress or Progress(off=True)

    def __call__(self, kind, name, data):
        answer = getattr(self, f"on_{kind}")(name, json.loads(data))
        return None if answer is None else dumps(answer)

    def on_score(self, name, batch):
        names = ("completion", "completion_ids", "sample", "truncated", "added_turns")
        rows = [{**batch["prompts"][prompt], **dict(zip(names, own))} for prompt, *own in batch["completions"]]
        more = {"environments": self.environments.scoring(name, rows)} if self.environments.factories else {}
        return _scores(self.rewards[name], rows, False, **more)

    def on_environment(self, _, request):
        return self.environments.answer(request)

    def on_step(self, _, report):
        return {"stop": False, "save": False, "evaluate": False}

    on_evaluation = on_step

    def on_save(self, _, report):
        pass

    def on_line(self, tone, line):
        # The rest is in log.txt of the run.
        if tone != "note":
            self.progress.line(line)

    def on_doing(self, _, state):
        self.progress.show(state)
