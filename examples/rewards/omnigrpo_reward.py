"""Serve a TRL-style reward function to omnigrpo, unchanged.

Without touching the file that holds it:

    omnigrpo train --reward_funcs 'cmd:"python omnigrpo_reward.py my_rewards.py:reward"' ...

or from within it:

    from omnigrpo_reward import serve

    def reward(prompts, completions, **columns):
        return [float(len(c[0]["content"]) < 100) for c in completions]

    serve(reward)

Prompts and completions arrive as TRL gives them for conversational data ([{"role": ..., "content": ...}]); with
`text=True` (or `--text`) as plain strings. Every column of the dataset is a keyword argument, one entry per completion;
so are `solution`, `completion_ids`, `image_path` (the row's media), and `trainer_state`, `log_extra`, `log_metric`.
Return one number, or None for "not applicable", per completion. `async def` works as well.
"""

import asyncio
import importlib.util
import inspect
import json
import pathlib
import sys
import traceback
from types import SimpleNamespace


def _arguments(rows, text):
    def message(role, content):
        return content if text else [{"role": role, "content": content}]

    columns = {name: None for row in rows for name in row["columns"]}
    columns = {name: [row["columns"].get(name) for row in rows] for name in columns if name not in ("prompt", "completion")}
    columns.setdefault("solution", [row["solution"] for row in rows])
    columns.setdefault("image_path", [row["media"] for row in rows])
    return columns | {
        "prompts": [message("user", row["prompt"]) for row in rows],
        "completions": [message("assistant", row["completion"]) for row in rows],
        "completion_ids": [row["completion_ids"] for row in rows],
        "trainer_state": SimpleNamespace(global_step=rows[0]["step"] if rows else 0),
        "log_extra": lambda *_: None,
        "log_metric": lambda *_: None,
    }


def serve(reward, text=False):
    """Answer requests on stdin until it closes. What the reward prints goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"id": request["id"]}
        try:
            values = reward(**_arguments(request["rows"], text))
            values = asyncio.run(values) if inspect.isawaitable(values) else values
            answer["rewards"] = [None if value is None else float(value) for value in values]
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
    answers, sys.stdout = sys.stdout, sys.stderr
    spec.loader.exec_module(module)
    sys.stdout = answers
    serve(getattr(module, function), text="--text" in sys.argv)


if __name__ == "__main__":
    main()
