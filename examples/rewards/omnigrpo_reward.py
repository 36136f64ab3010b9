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

Functions written for two other trainers work as well. The names of the parameters tell them apart.

EasyR1: a function with the parameter `reward_inputs` gets a list of dicts with `response`, `response_length` and
`ground_truth`, and returns a list. One with `reward_input`, or in a file with `REWARD_TYPE = "sequential"`, gets one such
dict and returns one value. A value is a number or a dict with `overall`.

verl: a function with the parameter `solution_str` is called once per completion, with `data_source`, `solution_str`,
`ground_truth` and `extra_info` as keywords; one with `solution_strs` once per batch, with `data_sources`, `solution_strs`,
`ground_truths` and `extra_infos`. So is a function `compute_score(**kwargs)`, once per completion. A value is a number or a
dict with `score`. `data_source` and `extra_info` are columns of the row; `ground_truth` is `reward_model.ground_truth` where
the row has it, else the solution.

Other numbers of such a dict become metrics of the step. Other texts become columns in the records of completions.
"""

import asyncio
import concurrent.futures
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


def _easy_r1(reward, rows, log, batch):
    """Calls a function of EasyR1."""
    inputs = [
        {"response": row["completion"], "response_length": len(row["completion_ids"]), "ground_truth": row["solution"]}
        for row in rows
    ]
    return _numbers(_settled(reward(inputs) if batch else [reward(one) for one in inputs]), "overall", log)


def _verl(reward, rows, log, parameters, batch):
    """Calls a function of verl with the keywords that it takes."""

    def ground_truth(row):
        model = row["columns"].get("reward_model")
        return model["ground_truth"] if isinstance(model, dict) and "ground_truth" in model else row["solution"]

    def extra_info(row):
        own = row["columns"].get("extra_info")
        # One question and one answer are two turns.
        return (own if isinstance(own, dict) else {}) | {"num_turns": 2, "rollout_reward_scores": {}}

    keywords = {
        "data_source": [row["columns"].get("data_source") or "" for row in rows],
        "solution_str": [row["completion"] for row in rows],
        "ground_truth": [ground_truth(row) for row in rows],
        "extra_info": [extra_info(row) for row in rows],
    }
    plural = "s" if batch else ""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    keywords = {name + plural: values for name, values in keywords.items() if takes_all or name + plural in parameters}
    if batch:
        scores = reward(**keywords)
    else:
        scores = [reward(**{name: values[i] for name, values in keywords.items()}) for i in range(len(rows))]
    return _numbers(_settled(scores), "score", log)


def _settled(values):
    """Waits for an asynchronous answer, or for one answer per completion."""

    async def gathered():
        return await asyncio.gather(*values)

    async def alone():
        return await values

    if inspect.isawaitable(values):
        return _run(alone())
    if isinstance(values, list) and any(map(inspect.isawaitable, values)):
        return _run(gathered())
    return values


def _run(coroutine):
    """Runs a coroutine to its end, also in a thread that has a running loop, as that of a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def _numbers(scores, key, log):
    """Returns the number of each score; what else a dict holds is recorded."""
    scores = list(scores)
    values = [score[key] if isinstance(score, dict) else score for score in scores]
    names = {name: None for score in scores if isinstance(score, dict) for name in score if name != key}
    for name in names:
        parts = [score.get(name) if isinstance(score, dict) else None for score in scores]
        try:
            if any(isinstance(part, str) for part in parts):
                raise ValueError(name)
            for number in [float(part) for part in parts if part is not None]:
                log.metric(name, number)
        except (TypeError, ValueError):
            log.extra(name, [part if part is None else str(part) for part in parts])
    return values


def _asked(reward, rows, text, log):
    """Calls the function in the form that its parameters ask for."""
    parameters = inspect.signature(reward).parameters
    required = [p for p in parameters.values() if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    kind = getattr(sys.modules.get(getattr(reward, "__module__", None)), "REWARD_TYPE", None) if len(required) == 1 else None
    if "reward_inputs" in parameters or kind == "batch":
        return _easy_r1(reward, rows, log, batch=True)
    if "reward_input" in parameters or kind == "sequential":
        return _easy_r1(reward, rows, log, batch=False)
    only_keywords = all(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "solution_strs" in parameters or "solution_str" in parameters:
        return _verl(reward, rows, log, parameters, batch="solution_strs" in parameters)
    if only_keywords and getattr(reward, "__name__", "") == "compute_score":
        return _verl(reward, rows, log, parameters, batch=False)
    return _settled(reward(**_arguments(rows, text, log)))


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
