"""TRL's trainers and their configuration."""

import dataclasses
import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from . import _omnigrpo
from ._calls import Calls, reward_names
from ._model import Model
from ._progress import Progress
from ._rows import dumps, file_of

# Settings of TRL that count although they have TRL's default, because omnigrpo's default differs.
_COUNTED = ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "beta", "loss_type", "learning_rate", "max_completion_length")
# Settings of TRL that are derived from others.
_DERIVED = ("generation_batch_size", "logging_dir", "accelerator_config", "disable_tqdm")


class GRPOConfig:
    """Settings of a run, by the names of `docs/flags.md`, which are those of TRL. What is not given has its default.

    `help(omnigrpo.GRPOConfig.describe)` explains how to look one up. `per_device_train_batch_size` counts prompts, each with
    `num_generations` completions, unless `batch_unit="completions"`.
    """

    _command = "train"

    def __init__(self, output_dir="runs/python", *, disable_tqdm=False, **settings):
        self.output_dir, self.disable_tqdm = Path(output_dir), disable_tqdm
        self.settings = {name: value for name, value in settings.items() if value is not None}
        try:
            _omnigrpo.read(self._command, dumps(self.settings))
        except ValueError as error:
            if "unknown setting" in str(error):
                raise TypeError(str(error)) from None
            raise

    def __getattr__(self, name):
        if name in self.__dict__.get("settings", {}):
            return self.settings[name]
        known = _properties().get(name)
        if known is None:
            raise AttributeError(name)
        return known.get("default")

    def __repr__(self):
        given = "".join(f", {name}={value!r}" for name, value in self.settings.items())
        return f"{type(self).__name__}({str(self.output_dir)!r}{given})"

    @staticmethod
    def describe(name):
        """Return what a setting does, with its unit, its values and its default."""
        return _properties()[name]["description"]

    @classmethod
    def of(cls, args):
        """Return the settings of TRL's `GRPOConfig` or `SFTConfig`.

        It takes what differs from TRL's defaults, and the batch, which counts completions in TRL. One warning names the settings
        that have no effect here. A setting that omnigrpo cannot honour is an error.
        """
        if isinstance(args, cls):
            return args
        taken = {"batch_unit": "completions"} if cls._command == "train" else {}
        for field in dataclasses.fields(args):
            value = getattr(args, field.name, None)
            default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            counted = field.name in _COUNTED and field.name in _properties()
            if field.name == "output_dir" or field.name in _DERIVED or value is None or value == default and not counted:
                continue
            if hasattr(value, "value"):  # an enum
                value = value.value
            taken[field.name] = value if isinstance(value, (bool, int, float, str, list, dict)) else str(value)
        return cls(args.output_dir, disable_tqdm=bool(getattr(args, "disable_tqdm", False)), **taken)


class SFTConfig(GRPOConfig):
    """Settings of supervised fine-tuning, by the names of `docs/flags.md`."""

    _command = "sft"


def _properties():
    if not _schema:
        _schema.update(json.loads(_omnigrpo.schema())["properties"])
    return _schema


_schema = {}


class TrainOutput(NamedTuple):
    """The result of `train`, in the form of `transformers`."""

    global_step: int
    training_loss: float
    metrics: dict


class _Run(Calls):
    """Answers the calls of a training run."""

    def __init__(self, trainer, rewards):
        super().__init__(rewards, Progress(trainer.args.disable_tqdm))
        self.trainer = trainer

    def on_step(self, _, report):
        trainer, step = self.trainer, report["step"]
        logs = {name: value for name, value in report["metrics"].items() if value is not None}
        trainer.state.global_step, trainer.state.epoch = step, logs.get("epoch", trainer.state.epoch)
        trainer.state.log_history.append({**logs, "step": step})
        if "reward" in logs:
            self.progress.rewards.append(logs["reward"])
        trainer._call("on_step_begin")
        trainer._call("on_step_end")
        trainer._call("on_log", logs=logs)
        return not trainer.control.should_training_stop

    def on_save(self, _, report):
        self.trainer._call("on_save")

    def on_evaluation(self, _, report):
        metrics = {name: value for name, value in report["metrics"].items() if value is not None}
        self.trainer.state.log_history.append({**metrics, "step": report["step"]})
        self.trainer._call("on_evaluate", metrics=metrics)


class GRPOTrainer:
    """Trains a model with rewards.

    `model` is a checkpoint directory or a name on the Hugging Face hub. `reward_funcs` are functions in TRL's form, or names of
    rewards (`"accuracy"`, `"FILE.py:FUNCTION"`, `"judge:http://…"`), one or a list. `args` is a `GRPOConfig` or TRL's.
    `train_dataset` and `eval_dataset` are paths of files of rows, a `datasets.Dataset`, or iterables of dicts. `callbacks` are
    those of `transformers`. `peft_config` is a `peft.LoraConfig`.
    """

    _config = GRPOConfig

    def __init__(self, model, reward_funcs="accuracy", args=None, train_dataset=None, eval_dataset=None, callbacks=None, peft_config=None):
        self.args = self._config() if args is None else self._config.of(args)
        names, self._functions = reward_names(reward_funcs)
        self._settings = {**self.args.settings, "model_name_or_path": os.fspath(getattr(model, "name_or_path", model))}
        if self._config._command == "train":
            self._settings["reward_funcs"] = names
        if peft_config is not None:
            self._settings.update(_lora(peft_config))
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks or []]
        self.state = SimpleNamespace(global_step=0, epoch=0.0, max_steps=self.args.max_steps or -1, log_history=[], is_world_process_zero=True)
        self.control = SimpleNamespace(should_training_stop=False, should_log=False, should_save=False, should_evaluate=False)
        self._model = None
        notes = json.loads(_omnigrpo.check(self._config._command, self._given(write=False)))["notes"]
        for note in notes:
            warnings.warn(note, stacklevel=2)
        self._call("on_init_end")

    def _call(self, event, **kwargs):
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(self.args, self.state, self.control, model=None, **kwargs)

    def _given(self, write=True):
        """Return all settings, with rows as files of the run directory, which are written unless `write` is false."""
        given = {**self._settings, "output_dir": str(self.args.output_dir)}
        for name in ("train", "eval"):
            rows = getattr(self, f"{name}_dataset")
            if rows is None:
                continue
            if write:
                # An iterator can be read only once, so that the file replaces it.
                rows = file_of(rows, self.args.output_dir / "rows", name)
                setattr(self, f"{name}_dataset", rows)
            given[f"{name}_file"] = [rows if isinstance(rows, (str, os.PathLike)) else f"{name}.jsonl"]
        return dumps(given)

    def train(self, resume_from_checkpoint=None):
        """Train to the end, or resume the run that `output_dir` contains.

        Ctrl-C ends the run after its step, with a checkpoint; the same call resumes it. A second Ctrl-C raises at once.
        """
        if resume_from_checkpoint is not None:
            self._settings["resume_from_checkpoint"] = resume_from_checkpoint
        self._model, self.control.should_training_stop = None, False
        run = _Run(self, self._functions)
        self._call("on_train_begin")
        try:
            done, model = _omnigrpo.train(self._config._command, self._given(), run)
        finally:
            run.progress.close()
        done, self._model = json.loads(done), Model(self._settings["model_name_or_path"], _inner=model)
        self._call("on_train_end")
        losses = [row["loss"] for row in self.state.log_history if "loss" in row]
        return TrainOutput(done["steps"], sum(losses) / max(1, len(losses)), done)

    @property
    def model(self):
        """The model that `train` has trained, in memory. Before `train`, that of `output_dir`."""
        if self._model is None:
            self._model = Model.load(self.args.output_dir)
        return self._model


class SFTTrainer(GRPOTrainer):
    """Trains a model to imitate the answers of rows. The parameters are those of `GRPOTrainer` without rewards."""

    _config = SFTConfig

    def __init__(self, model, args=None, train_dataset=None, eval_dataset=None, callbacks=None, peft_config=None):
        super().__init__(model, [], args, train_dataset, eval_dataset, callbacks, peft_config)


def plan(trainer):
    """Return the memory (bytes) and the time (seconds) that a trainer's run is expected to take, as `omnigrpo plan --json`."""
    command = "sft" if trainer._config._command == "sft" else "plan"
    return json.loads(_omnigrpo.plan(command, trainer._given(), Calls(trainer._functions)))


def _lora(config):
    """Return the settings of a `peft.LoraConfig`."""
    settings = {"use_peft": True, "lora_r": config.r, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout}
    modules = config.target_modules
    if modules is not None:
        settings["lora_target_modules"] = [modules] if isinstance(modules, str) else sorted(modules)
    refused = {"use_dora": False, "use_rslora": False, "bias": "none", "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}}
    for name, off in refused.items():
        value = getattr(config, name, off)
        if value != off and value:
            raise ValueError(f"peft.LoraConfig has {name}={value!r}, expected {off!r}: omnigrpo has no counterpart")
    return settings
