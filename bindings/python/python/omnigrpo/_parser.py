"""Configurations from the command line and a file, as TRL's parser reads them."""

import dataclasses
import json
import os
import sys

from . import _omnigrpo
from ._trainer import GRPOConfig, _properties


class TrlParser:
    """Makes configurations from arguments such as `--learning_rate 1e-5` and from the YAML file of `--config`.

    `dataclass_types` is a class or a list of them: `GRPOConfig`, `SFTConfig`, TRL's `ModelConfig` and `ScriptArguments`, and data classes
    of a script. Those other than omnigrpo's need `transformers`. Arguments take precedence over the file. Its key `env` sets variables of
    the environment.
    """

    def __init__(self, dataclass_types=None, **kwargs):
        given = dataclass_types if isinstance(dataclass_types, (list, tuple)) else [dataclass_types] if dataclass_types else []
        self.types, self._options = list(given), kwargs
        for kind in self.types:
            if not (isinstance(kind, type) and (issubclass(kind, GRPOConfig) or dataclasses.is_dataclass(kind))):
                raise TypeError(f"dataclass_types has {kind!r}, expected GRPOConfig, SFTConfig or data classes")

    def parse_args_and_config(self, args=None, return_remaining_strings=False, fail_with_unknown_args=True):
        """Return an object of each class, and the remaining arguments if `return_remaining_strings`."""
        words = list(sys.argv[1:] if args is None else args)
        file = {}
        if "--config" in words:
            at = words.index("--config")
            if at + 1 == len(words):
                raise ValueError("--config needs the path of a YAML file")
            file = _read(words[at + 1])
            del words[at : at + 2]
        for name, value in (file.pop("env", None) or {}).items():
            os.environ[name] = str(value)
        others = [kind for kind in self.types if not issubclass(kind, GRPOConfig)]
        # A name of a data class is its own, also if a configuration has it.
        fields = {field.name for kind in others for field in dataclasses.fields(kind)}
        settings, made = {}, []
        if len(others) < len(self.types):
            own, words = _own(words, fields)
            settings = {**{name: value for name, value in file.items() if name not in fields and _known(name)}, **own}
        if others:
            from transformers import HfArgumentParser

            parser = HfArgumentParser(others, **self._options)
            # A required argument may be in the file.
            for action in parser._actions:
                if action.dest in file:
                    action.required = False
            parser.set_defaults(**{name: value for name, value in file.items() if name in fields})
            *made, words = parser.parse_args_into_dataclasses(args=words, return_remaining_strings=True)
        unknown = [word for name, value in file.items() if name not in settings and name not in fields for word in (f"--{name}", str(value))]
        remaining = [*words, *unknown]
        if remaining and fail_with_unknown_args and not return_remaining_strings:
            raise ValueError(f"unknown arguments: {', '.join(map(str, remaining))}")
        made = iter(made)
        result = tuple(kind(**settings) if issubclass(kind, GRPOConfig) else next(made) for kind in self.types)
        return (*result, remaining) if return_remaining_strings else result


def _read(path):
    try:
        import yaml
    except ImportError:
        raise ImportError("--config needs the package PyYAML: `pip install pyyaml`") from None
    with open(path, encoding="utf-8") as file:
        content = yaml.safe_load(file) or {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} has a {type(content).__name__}, expected names with values")
    return content


def _own(words, fields):
    """Return the settings among arguments, without these fields, and the other arguments. A flag without a value is true."""
    settings, rest, words = {}, [], list(words)
    while words:
        word = words.pop(0)
        name, given, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or name in fields or not _known(name):
            rest.append(word)
            # The values of an argument of another class.
            while word.startswith("--") and words and not words[0].startswith("--"):
                rest.append(words.pop(0))
            continue
        values = [value] if given else []
        while not given and words and not words[0].startswith("--"):
            values.append(words.pop(0))
        values = [_value(name, one) for one in values]
        settings[name] = values[0] if len(values) == 1 else values or True
    return settings, rest


def _known(name):
    """Return whether a name is a setting, or one of TRL that a configuration accepts."""
    if name in _properties or name == "output_dir":
        return True
    try:
        _omnigrpo.read("train", json.dumps({name: True}))
    except ValueError as error:
        return "unknown setting" not in str(error)
    return True


# Settings whose values are texts, also those that look like numbers.
_TEXTS = ("output_dir", "run_name", "hub_model_id", "model_name_or_path", "system_prompt", "train_file", "eval_file")


def _value(name, text):
    """Return the number, truth value, list or text that an argument means."""
    if name in _TEXTS or name.endswith(("_path", "_dir", "_file", "_column")):
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return json.loads(text)
    except ValueError:
        return text
