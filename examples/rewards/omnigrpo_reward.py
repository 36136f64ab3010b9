"""Serve a TRL-style reward function, tool or environment to omnigrpo, unchanged.

omnigrpo carries this file and runs it by itself for a reward, a tool or an environment that is given as FILE.py:NAME:

    omnigrpo train --reward_funcs my_rewards.py:reward ...
    omnigrpo train --environment my_tools.py:look ...

Run it yourself to use another interpreter, or from within the file that holds the function:

    omnigrpo train --reward_funcs 'cmd:"uv run omnigrpo_reward.py my_rewards.py:reward"' ...

    from omnigrpo_reward import serve

    def reward(prompts, completions, **columns):
        return [float(len(c[0]["content"]) < 100) for c in completions]

    serve(reward)

Prompts and completions arrive as TRL gives them for conversational data: each prompt is the whole conversation, a list of
{"role": ..., "content": ...} with the system turn and earlier turns. In rows with media each content is a list of parts,
{"type": "text", "text": ...} and {"type": "image", "image": path}. They are plain strings in rows whose prompt is a text that the
model continues without a chat template (`--continue_text_prompts`), and with `text=True` (or `--text`); a prompt is then the text of
the last question. Every column of the dataset is a keyword argument, one entry per completion;
so are `solution`, `completion_ids`, `image_path` (the row's media), and `trainer_state`. `log_metric(name, value)` and
`log_extra(column, values)` work as in TRL: metrics of the step, columns in the records of completions.
A completion that called tools is a list of all its turns, those of the tools included.
Return one number, or None for "not applicable", per completion. `async def` works as well. A function may state the smallest and the
largest number that it returns: `reward.range = (0, 1)`. The run then knows which reward is the best possible one.

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

A tool is a function with type hints and a docstring that has a section `Args:` (Google's style), from which the model reads how to
call it. An environment is a class: its public methods are tools; `reset(**columns)` is called before the first call of each
completion, and may return a text or a list of parts that is appended to the question. Tools may be asynchronous. A result is a text or a
list of parts such as {"type": "image", "image": picture}. The model reads an exception as {'error': ...}.
"""

import asyncio
import base64
import concurrent.futures
import enum
import functools
import importlib.util
import inspect
import io
import json
import math
import os
import pathlib
import re
import sys
import traceback
import types
import typing


class _Log:
    """What a function wants recorded of one request."""

    def __init__(self):
        self.values, self.columns = {}, {}

    def metric(self, name, value):
        self.values.setdefault(str(name), []).append(_finite(value, f"the metric `{name}`"))

    def extra(self, column, values):
        self.columns[str(column)] = list(values)

    def answer(self):
        means = {name: sum(values) / len(values) for name, values in self.values.items()}
        parts = {"metrics": means, "columns": self.columns}
        return {name: part for name, part in parts.items() if part}


def _arguments(rows, text, log, more):
    def prompt(row):
        turns = row.get("turns") or [{"role": "user", "content": row["prompt"]}]
        return row["prompt"] if text or row.get("is_text") else turns[: len(turns) - row.get("added_turns", 0)]

    def completion(row):
        added = row["turns"][-row["added_turns"] :] if row.get("added_turns") else []
        return row["completion"] if text or row.get("is_text") else [*added, {"role": "assistant", "content": row["completion"]}]

    columns = {name: None for row in rows for name in row["columns"]}
    columns = {name: [row["columns"].get(name) for row in rows] for name in columns if name not in ("prompt", "completion")}
    columns.setdefault("solution", [row["solution"] for row in rows])
    columns.setdefault("image_path", [row["media"] for row in rows])
    return columns | {
        "prompts": [prompt(row) for row in rows],
        "completions": [completion(row) for row in rows],
        "completion_ids": [row["completion_ids"] for row in rows],
        "trainer_state": types.SimpleNamespace(global_step=rows[0]["step"] if rows else 0),
        "log_extra": log.extra,
        "log_metric": log.metric,
        **more,
    }


def _easy_r1(reward, rows, log, batch):
    """Calls a function of EasyR1."""
    inputs = [
        {"response": row["completion"], "response_length": len(row["completion_ids"]), "ground_truth": row["solution"]}
        for row in rows
    ]
    scores = _settled(reward(inputs) if batch else [reward(one) for one in inputs])
    return _numbers(_listed(reward, scores), "overall", log)


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
    return _numbers(_listed(reward, _settled(scores)), "score", log)


def _settled(values, **how):
    """Waits for an asynchronous answer, or for those of a list that are asynchronous."""

    async def waited(value):
        return await value if inspect.isawaitable(value) else value

    async def gathered():
        return await asyncio.gather(*map(waited, values), **how)

    if inspect.isawaitable(values):
        return _run(waited(values))
    if isinstance(values, list) and any(map(inspect.isawaitable, values)):
        return _run(gathered())
    return values


class _MissingColumn(TypeError):
    """A parameter of a reward without a column. Its message says all, so no traceback is shown with it."""


def _stated_range(reward):
    """Returns the smallest and the largest value that a reward states, as part of an answer."""
    stated = getattr(reward, "range", None)
    if stated is None or callable(stated):
        return {}
    try:
        low, high = (float(end) for end in stated)
    except (TypeError, ValueError):
        low = high = math.nan
    if not low < high:
        raise TypeError(f"the range of the reward `{_named(reward)}` is {stated!r:.80}, expected two numbers such as (0, 1), the smaller one first")
    # JSON has no infinite numbers.
    return {"range": [end if math.isfinite(end) else None for end in (low, high)]}


def _named(reward):
    return getattr(reward, "__name__", type(reward).__name__)


def _listed(reward, values):
    """Returns what a reward has returned as a list."""
    if isinstance(values, (dict, set, str, bytes)) or not hasattr(values, "__iter__"):
        kind = type(values).__name__
        raise TypeError(f"the reward `{_named(reward)}` returned a {kind}, expected a list with a finite number, or None, per completion")
    return list(values)


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


def _asked(reward, rows, text, log, **more):
    """Calls the function in the form that its parameters ask for. `more` are keywords of TRL's form."""
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
    arguments = _arguments(rows, text, log, more)
    by_keyword = (p for p in parameters.values() if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    lacking = [p.name for p in by_keyword if p.name not in arguments]
    if lacking:
        columns = list(dict.fromkeys(name for row in rows for name in row["columns"]))
        raise _MissingColumn(
            f"the reward `{_named(reward)}` takes {', '.join(f'`{name}`' for name in lacking)}, and the rows have no such column; "
            f"they have: {', '.join(columns) or 'none'}; every reward also gets: {', '.join(n for n in arguments if n not in columns)}"
        )
    return _listed(reward, _settled(reward(**arguments)))


_JSON = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null", list: "array", tuple: "array", dict: "object"}
# Classes by name, so that their packages are not imported.
_JSON_BY_NAME = {"PIL.Image.Image": "image", "torch.Tensor": "audio"}
_UNIONS = (typing.Union, getattr(types, "UnionType", typing.Union))


def _choice(values):
    """Returns the JSON Schema of a choice."""
    types = list(dict.fromkeys(_JSON[type(value)] for value in values))
    return {"type": types[0] if len(types) == 1 else types, "enum": values}


def _type_schema(hint):
    """Returns the JSON Schema of a type hint, as `transformers.utils.get_json_schema` derives it."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is typing.Any:
        return {}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choice([member.value for member in hint])
    if origin is typing.Literal:
        return _choice(list(parts))
    if origin in _UNIONS:
        kinds = [_type_schema(part) for part in parts if part is not type(None)]
        simple = all(kind.keys() == {"type"} and isinstance(kind["type"], str) for kind in kinds)
        names = sorted({kind["type"] for kind in kinds}) if simple else []
        kind = kinds[0] if len(kinds) == 1 else {"type": names[0] if len(names) == 1 else names} if simple else {"anyOf": kinds}
        return {**kind, "nullable": True} if type(None) in parts else kind
    if origin is tuple and len(parts) > 1 and ... not in parts:
        return {"type": "array", "prefixItems": [_type_schema(part) for part in parts]}
    if origin is list:
        return {"type": "array", "items": _type_schema(parts[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(parts[1])}
    kind = _JSON.get(hint) or _JSON_BY_NAME.get(f"{getattr(hint, '__module__', '')}.{getattr(hint, '__qualname__', '')}")
    if kind is None:
        raise TypeError(f"the type {hint!r}, expected int, float, str, bool, Literal, an Enum, or list, tuple, dict or Union of these")
    return {"type": kind}


def _described(function):
    """Returns what a docstring in Google's style tells: the description, and the texts of the arguments and of the result."""
    first, *sections = re.split(r"^[ \t]*(Args|Returns|Raises):[ \t]*$", "\n" + (inspect.getdoc(function) or ""), flags=re.M)
    sections = dict(zip(sections[::2], sections[1::2]))
    lines = [line for line in sections.get("Args", "").splitlines() if line.strip()]
    least = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    arguments = {}
    for line in lines:
        start = re.match(rf"[ \t]{{{least}}}(\w+)(?: \(.*?\))?:\s*(.*)", line)
        if start:
            name, arguments[start[1]] = start[1], start[2].strip()
        elif arguments:
            arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    return first.strip(), arguments, sections.get("Returns", "").strip()


def tool_schema(function):
    """Return the description of a tool for a prompt, in the format of OpenAI, as `transformers.utils.get_json_schema` does."""

    def wrong(what):
        return TypeError(f"the tool `{function.__name__}` {what}; a tool needs type hints and a docstring with a section `Args:`")

    (description, texts, result), hints = _described(function), typing.get_type_hints(function)
    if not description:
        raise wrong("has no docstring")
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in hints or name not in texts:
            raise wrong(f"has the argument `{name}` without a {'type hint' if name not in hints else 'description'}")
        try:
            properties[name] = _type_schema(hints[name])
        except TypeError as error:
            raise wrong(f"has the argument `{name}` with {error}") from None
        choices = re.search(r"\(choices:\s*(.*?)\)\s*$", texts[name], re.I)
        if choices:
            properties[name]["enum"] = json.loads(choices[1])
        properties[name]["description"] = texts[name][: choices.start()].strip() if choices else texts[name]
        required += [name] if parameter.default is parameter.empty else []
    about = {"name": function.__name__, "description": description, "parameters": {"type": "object", "properties": properties}}
    if required:
        about["parameters"]["required"] = required
    try:
        about["return"] = {**_type_schema(hints["return"]), **({"description": result} if result else {})}
    except (KeyError, TypeError):
        pass  # The model does not write the result.
    return {"type": "function", "function": about}


# Tag of EXIF with the turn of a picture that is stored sideways.
_ORIENTATION = 0x0112


def medium(value):
    """Return a picture, clip or sound as its path or as the bytes of its file: a path, bytes, a dict of datasets, a PIL image or an array."""
    if isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        return text if text.startswith(("http://", "https://", "data:")) else os.path.abspath(text)
    if isinstance(value, dict):  # datasets.Image(decode=False)
        return medium(value["path"] if value.get("bytes") is None else value["bytes"])
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if not hasattr(value, "save"):
        if getattr(value, "ndim", 0) not in (2, 3):
            raise TypeError(f"a medium is a {type(value).__name__}, expected a path, bytes, a PIL image or an array of pixels")
        from PIL import Image

        value = Image.fromarray(value)
    out = io.BytesIO()
    turn = value.getexif().get(_ORIENTATION, 1) if hasattr(value, "getexif") else 1
    if turn != 1:  # The setting `orientation` decides, as for a file.
        from PIL import Image

        exif = Image.Exif()
        exif[_ORIENTATION] = turn
        value.save(out, "PNG", exif=exif)
        return out.getvalue()
    # Writing a PNG takes fifty times as long as writing a BMP, which has no transparency.
    value.save(out, "BMP" if value.mode == "RGB" else "PNG")
    return out.getvalue()


def _parts(content):
    """Returns the parts of a result: a list of parts, or the text of any other value."""

    def part(one):
        if one["type"] == "text":
            return {"type": "text", "text": str(one["text"])}
        found = medium(one[one["type"]])
        if isinstance(found, bytes):
            found = "data:application/octet-stream;base64," + base64.b64encode(found).decode()
        return {"type": one["type"], one["type"]: found}

    if isinstance(content, list) and content and all(isinstance(one, dict) and "type" in one for one in content):
        return [part(one) for one in content]
    return [{"type": "text", "text": str(content)}]


def _text(content):
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


class Environments:
    """Answers requests with tools, which are functions, and with environments that a factory makes, in TRL's form.

    `factory` may be a dict of factories; the column `environment` of a row then chooses one. Each completion has an environment of
    its own, from its first call to its reward.
    """

    def __init__(self, tools=None, factory=None):
        self.tools, self.is_chosen = list(tools or []), isinstance(factory, dict)
        self.factories = factory if self.is_chosen else {None: factory} if factory else {}
        self.free = {name: [make()] for name, make in self.factories.items()}
        self.used, self.rollout, self.scored = {}, None, set()
        for name, (first,) in self.free.items():
            if not callable(getattr(type(first), "reset", None)):
                raise ValueError(f"the environment {type(first).__name__} has no method `reset`")
        self.schemas = {name: self._schemas(first) for name, (first,) in self.free.items()} or {None: self._schemas(None)}
        kinds = dict.fromkeys(type(first) for (first,) in self.free.values())
        self.names = [tool.__name__ for tool in self.tools] + [kind.__name__ for kind in kinds]
        # Rewards of environments that have their own, by the names of their classes.
        self.rewards = {kind.__name__: functools.partial(_own_rewards, kind) for kind in kinds if hasattr(kind, "get_reward")}

    def answer(self, request):
        """Return the answer to a request, without its id."""
        if request.get("probe"):
            every = [schema for schemas in self.schemas.values() for schema in schemas]
            unique = [schema for at, schema in enumerate(every) if schema not in every[:at]]
            return {"tools": unique, "answers_text": False, "opens": bool(self.factories)}
        if request.get("open"):
            name = self._name(request)
            environment = self._take(name)
            observation = self._reset(environment, request)
            self.free[name].append(environment)
            tools = {"tools": self.schemas[name]} if self.is_chosen else {}
            return {"answer": None if observation is None else _parts(observation), **tools}
        tools = {tool.__name__: tool for tool in self._tools(self._of(request) if self.factories else None)}
        results, failed = _results(tools, request["calls"])
        parts = [part for result in results for part in [{"type": "text", "text": "\n"}, *result]]
        return {"answer": parts[1:], "failed": failed}

    def questions(self, max_steps):
        """Return the rows of a run without a dataset: the environment asks by what its `reset` returns."""
        if self.is_chosen:
            raise ValueError("there is no train_dataset, expected rows whose column `environment` chooses a factory")
        if (max_steps or 0) < 1:
            raise ValueError("there are neither rows nor `max_steps`, expected one of them to know the length of the run")
        return [{"prompt": [{"role": "user", "content": ""}]}]

    def scoring(self, name, rows):
        """Return the environments of completions that the reward `name` is about to score."""
        # The next batch begins where a reward comes again.
        if name in self.scored:
            self._release()
        self.scored.add(name)
        known = lambda row: self.used.get((row["row"], row["sample"]))  # noqa: E731
        return [(known(row) or self._begin(row))[1] for row in rows]

    def _tools(self, environment):
        """Returns the functions that a model may call: the tools, and the public methods of an environment."""
        names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)] if environment else []
        return self.tools + [getattr(environment, n) for n in names if not n.startswith("_") and n not in ("reset", "get_reward")]

    def _schemas(self, environment):
        return [tool_schema(tool) for tool in self._tools(environment)]

    def _name(self, about):
        name = about["columns"].get("environment") if self.is_chosen else None
        if name not in self.factories:
            raise ValueError(f"row {about['row']} has the environment {name!r}, expected one of {list(self.factories)}")
        return name

    def _take(self, name):
        return self.free[name].pop() if self.free[name] else self.factories[name]()

    def _reset(self, environment, about):
        columns = about["columns"].items()
        return environment.reset(**{name: value for name, value in columns if not self.is_chosen or name != "environment"})

    def _begin(self, about):
        """Resets an environment for a completion, and returns what it has returned, and the environment."""
        name = self._name(about)
        environment = self._take(name)
        self.used[about["row"], about["sample"]] = name, environment
        return self._reset(environment, about), environment

    def _of(self, request):
        """Returns the environment of the completion that asks."""
        if self.scored or request["rollout"] != self.rollout:
            self._release()
            self.rollout = request["rollout"]
        key = request["row"], request["sample"]
        if request["turn"] > 1:
            if key not in self.used:
                raise RuntimeError("the process that held the environment of this completion has ended")
            return self.used[key][1]
        observation, environment = self._begin(request)
        if observation is not None and not _text(request["turns"][-1]["content"]).endswith(_text(observation)):
            raise ValueError(
                f"`reset` of {type(environment).__name__} returned {observation!r:.200}, expected what it returned before for row "
                f"{request['row']}: the completions of a row share its prompt"
            )
        return environment

    def _release(self):
        """Gives the environments of the last batch back."""
        for name, environment in self.used.values():
            self.free[name].append(environment)
        self.used, self.scored = {}, set()


def _own_rewards(kind, /, environments, **columns):
    return [environment.get_reward() if type(environment) is kind else None for environment in environments]


def _results(tools, calls):
    """Returns the parts of each call's result, and how many calls failed. Asynchronous tools run together."""

    def called(call):
        try:
            if "error" in call:
                raise ValueError(call["error"])
            if call["name"] not in tools:
                raise ValueError(f"Tool {call['name']} not found.")
            return tools[call["name"]](**call["arguments"])
        except Exception as error:
            return error

    results = _settled([called(call) for call in calls], return_exceptions=True)
    failed = [isinstance(result, Exception) for result in results]
    # The model reads the error.
    return [_parts({"error": str(one)} if bad else one) for one, bad in zip(results, failed)], sum(failed)


def _pipes():
    """Requests and answers, out of reach of the reward and of programs it starts: what they print goes to stderr."""
    pipes = [os.fdopen(os.dup(number), mode, encoding="utf-8") for number, mode in ((0, "r"), (1, "w"))]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return pipes


def _finite(value, what):
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{what} is {value!r:.80}, expected a finite number") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}, expected a finite number")
    return number


def _scores(reward, rows, text, **more):
    log = _Log()
    values = _asked(reward, rows, text, log, **more)

    def number(at, value):
        # The caller refuses a list of another length.
        where = f"row {rows[at]['row']}, completion {rows[at]['sample']}" if at < len(rows) else f"value {at}"
        return None if value is None else _finite(value, f"the reward `{_named(reward)}` of {where}")

    return {"rewards": [number(at, value) for at, value in enumerate(values)], **_stated_range(reward), **log.answer()}


def to_json(value, default=None):
    """Return a value as JSON. An error names the number that is not finite, and `default` returns what replaces a value."""
    try:
        return json.dumps(value, default=default, allow_nan=False)
    except ValueError:
        found = _not_finite(value, default)
        if found is None:
            raise
        raise ValueError(f"`{found[0]}` is {found[1]}, expected a finite number") from None


def _not_finite(value, default, path=""):
    """Returns the place of a number that is not finite, and the number."""
    if isinstance(value, float):
        return None if math.isfinite(value) else (path, value)
    if isinstance(value, dict):
        parts = [(f"{path}.{name}" if path else str(name), part) for name, part in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{path}[{at}]", part) for at, part in enumerate(value)]
    elif value is None or isinstance(value, (bool, int, str)):
        return None
    else:
        return _not_finite(default(value), default, path)
    return next((found for where, part in parts if (found := _not_finite(part, default, where))), None)


def serve(function, text=False, pipes=None):
    """Answer requests on stdin until it closes: with a reward, a tool or an environment. What it prints goes to stderr."""
    requests, answers = pipes or _pipes()
    environments = None
    for line in requests:
        request = json.loads(line)
        try:
            if "rows" in request:
                answer = _scores(function, request["rows"], text)
            else:
                environments = environments or _environments(function)
                answer = environments.answer(request)
            out = to_json({"id": request["id"], **answer})
        except Exception as error:
            kind = "error" if "rows" in request else "fault"
            told = str(error) if isinstance(error, _MissingColumn) else traceback.format_exc(limit=-3)
            if "'list' object has no attribute" in told and kind == "error":
                told += "\na completion is a list of messages here; its text is completion[-1]['content']"
            out = json.dumps({"id": request["id"], kind: told})
        print(out, file=answers, flush=True)


def _environments(function):
    """Returns the environments of a class, or those of a single tool."""
    if not inspect.isclass(function):
        return Environments([function])
    if hasattr(function, "get_reward"):
        raise TypeError(f"{function.__name__} has `get_reward`, which needs the Python module; give its reward to `reward_funcs`")
    return Environments(factory=function)


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--text"]
    if len(arguments) != 1 or ":" not in arguments[0]:
        sys.exit("usage: python omnigrpo_reward.py [--text] FILE.py:NAME")
    path, name = arguments[0].rsplit(":", 1)
    sys.path.insert(0, str(pathlib.Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # Importing may print, too.
    pipes = _pipes()
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        is_own = lambda value: (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == spec.name  # noqa: E731
        own = [name for name, value in vars(module).items() if is_own(value)]
        sys.exit(f"{path} has no function `{name}`; it has: {', '.join(own) or 'none'}")
    serve(function, text="--text" in sys.argv, pipes=pipes)


if __name__ == "__main__":
    main()
