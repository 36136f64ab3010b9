"""Serve a TRL-style reward function to omnigrpo, unchanged.

omnigrpo carries this file and runs it by itself for a reward that is given as FILE.py:FUNCTION:

    omnigrpo train --reward_funcs my_rewards.py:reward ...

Run it yourself to use another interpreter, or from within the file that holds the function:

    omnigrpo train --reward_funcs 'cmd:"uv run omnigrpo_reward.py my_rewards.py:reward"' ...

    from omnigrpo_reward import serve

    def reward(prompts, completions, **columns):
        return [float(len(c[0]["content"]) < 100) for c in completions]

    serve(reward)

Prompts and completions arrive as TRL gives them for conversational data: each prompt is the whole conversation, a list of
{"role": ..., "content": ...} with the system turn and earlier turns. In rows with media each content is a list of parts,
{"type": "text", "text": ...} and {"type": "image", "image": path}. With `text=True` (or `--text`) they are plain strings, a
prompt the text of the last question. Every column of the dataset is a keyword argument, one entry per completion;
so are `solution`, `completion_ids`, `image_path` (the row's media), and `trainer_state`. `log_metric(name, value)` and
`log_extra(column, values)` work as in TRL: metrics of the step, columns in the records of completions.
Return one number, or None for "not applicable", per completion. `async def` works as well.

A function with the parameter `reward_inputs` is called as EasyR1 calls one: a list of dicts with `response`,
`response_length` and `ground_truth` in; a list of numbers, or of dicts with `overall`, out.
"""

import asyncio
import importlib.util
import inspect
import json
import os
import pathlib
import sys
import traceback
from types import SimpleNamespace


class _Log:
    """What a function wants recorded of one request."""

    def __init__(self):
        self.values, self.columns = {}, {}

    def metric(self, name, value):
        self.values.setdefault(str(name), []).append(float(value))

    def extra(self, column, values):
        self.columns[str(column)] = list(values)

    def answer(self):
        means = {name: sum(values) / len(values) for name, values in self.values.items()}
        parts = {"metrics": means, "columns": self.columns}
        return {name: part for name, part in parts.items() if part}


def _arguments(rows, text, log):
    def message(role, content):
        return content if text else [{"role": role, "content": content}]

    def prompt(row):
        return not text and row.get("turns") or message("user", row["prompt"])

    columns = {name: None for row in rows for name in row["columns"]}
    columns = {name: [row["columns"].get(name) for row in rows] for name in columns if name not in ("prompt", "completion")}
    columns.setdefault("solution", [row["solution"] for row in rows])
    columns.setdefault("image_path", [row["media"] for row in rows])
    return columns | {
        "prompts": [prompt(row) for row in rows],
        "completions": [message("assistant", row["completion"]) for row in rows],
        "completion_ids": [row["completion_ids"] for row in rows],
        "trainer_state": SimpleNamespace(global_step=rows[0]["step"] if rows else 0),
        "log_extra": log.extra,
        "log_metric": log.metric,
    }


def _asked(reward, rows, text, log):
    """The function's answer, in the way that its parameters ask for."""
    if "reward_inputs" not in inspect.signature(reward).parameters:
        return reward(**_arguments(rows, text, log))
    inputs = [
        {"response": row["completion"], "response_length": len(row["completion_ids"]), "ground_truth": row["solution"]}
        for row in rows
    ]
    values = []
    for score in reward(reward_inputs=inputs):
        values.append(score["overall"] if isinstance(score, dict) else score)
        for name, value in score.items() if isinstance(score, dict) else ():
            if name != "overall":
                log.metric(name, value)
    return values


def _pipes():
    """Requests and answers, out of reach of the reward and of programs it starts: what they print goes to stderr."""
    pipes = [os.fdopen(os.dup(number), mode, encoding="utf-8") for number, mode in ((0, "r"), (1, "w"))]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return pipes


def serve(reward, text=False, pipes=None):
    """Answer requests on stdin until it closes. What the reward prints goes to stderr."""
    requests, answers = pipes or _pipes()
    for line in requests:
        request = json.loads(line)
        log = _Log()
        try:
            values = _asked(reward, request["rows"], text, log)
            values = asyncio.run(values) if inspect.isawaitable(values) else values
            rewards = [None if value is None else float(value) for value in values]
            answer = {"id": request["id"], "rewards": rewards} | log.answer()
            out = json.dumps(answer, allow_nan=False)
        except Exception:
            out = json.dumps({"id": request["id"], "error": traceback.format_exc(limit=-3)})
        print(out, file=answers, flush=True)


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--text"]
    if len(arguments) != 1 or ":" not in arguments[0]:
        sys.exit("usage: python omnigrpo_reward.py [--text] FILE.py:FUNCTION")
    path, function = arguments[0].rsplit(":", 1)
    sys.path.insert(0, str(pathlib.Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # Importing may print, too.
    pipes = _pipes()
    spec.loader.exec_module(module)
    reward = getattr(module, function, None)
    if not callable(reward):
        own = [name for name, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == spec.name]
        sys.exit(f"{path} has no function `{function}`; it has: {', '.join(own) or 'none'}")
    serve(reward, text="--text" in sys.argv, pipes=pipes)


if __name__ == "__main__":
    main()
