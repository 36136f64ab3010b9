"""TRL's trainers and their configuration."""

import atexit
import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from . import _omnigrpo
from ._calls import Calls, with_functions
from ._model import Model
from ._progress import Progress
from ._rows import dumps, file_of

_properties = json.loads(_omnigrpo.schema())["properties"]
# A process has to leave the other ranks before it ends.
atexit.register(_omnigrpo.leave)


class GRPOConfig:
    """Settings of a run, by name. Most names are those of TRL. What is not given has its default.

    `per_device_train_batch_size` counts prompts, each with `num_generations` completions, unless `batch_unit="completions"`.

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
        if name not in _properties:
            raise AttributeError(name)
        return _properties[name].get("default")

    def __repr__(self):
        given = "".join(f", {name}={value!r}" for name, value in self.settings.items())
        return f"{type(self).__name__}({str(self.output_dir)!r}{given})"

    @staticmethod
    def describe(name):
        """Return what a setting does, with its unit, its values and its default."""
        return _properties[name]["description"]

    @classmethod
    def of(cls, args):
        """Return the settings of TRL's `GRPOConfig` or `SFTConfig`.

        TRL's defaults are those of the preset `trl`, and batches count completions as in TRL. One warning names the settings that have
        no effect here. A setting that omnigrpo cannot honour is an error.
        """
        if isinstance(args, cls):
            return args
        # A configuration for a card cannot be made without one.
        default = type(args)(args.output_dir, use_cpu=True)
        default.use_cpu = False
        given = _given(args, default)
        given.update(given.pop("model_init_kwargs", {}))
        # TRL computes it from `steps_per_generation`, or the reverse.
        given.pop("generation_batch_size", None)
        return cls(args.output_dir, preset="trl", **given)


def _given(config, default):
    """Return the fields of a dataclass that were given: those that are neither the default nor what the class makes of it."""
    values = {}
    for field in dataclasses.fields(config):
        value, own = getattr(config, field.name), getattr(default, field.name)
        written = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if value is not None and value not in (own, written):
            values[field.name] = value
    return values


class SFTConfig(GRPOConfig):
    """Settings of supervised fine-tuning, by the names of `docs/flags.md`."""

    _command = "sft"


GRPOConfig.__doc__ = (GRPOConfig.__doc__ or "") + "\n".join(f"    {name}: {about['description']}" for name, about in _properties.items() if "$ref" not in about)


class TrainOutput(NamedTuple):
    """The result of `train`, in the form of `transformers`."""

    global_step: int
    training_loss: float
    metrics: dict


class _Run(Calls):
    """Answers the calls of a training run."""

    def __init__(self, trainer):
        progress = Progress(trainer.args.disable_tqdm, quiet=not trainer.state.is_world_process_zero)
        super().__init__(trainer._functions, trainer._environments, progress)
        self.state, self.control, self.call = trainer.state, trainer.control, trainer._call

    def _logged(self, report):
        logs = {name: value for name, value in report["metrics"].items() if value is not None}
        self.state.log_history.append({**logs, "step": report["step"]})
        return logs

    def on_step(self, _, report):
        logs = self._logged(report)
        self.state.global_step, self.state.epoch = report["step"], logs.get("epoch", self.state.epoch)
        self.progress.rewards += [logs["reward"]] if "reward" in logs else []
        self.call("on_step_begin")
        self.call("on_step_end")
        self.call("on_log", logs=logs)
        return not self.control.should_training_stop

    def on_save(self, _, report):
        self.call("on_save")

    def on_evaluation(self, _, report):
        self.call("on_evaluate", metrics=self._logged(report))


class GRPOTrainer:
    """Trains a model with rewards.

    `model` is a checkpoint directory or a name on the Hugging Face hub. `reward_funcs` are functions in TRL's form, or names of
    rewards (`"accuracy"`, `"FILE.py:FUNCTION"`, `"judge:http://…"`), one or a list. `args` is a `GRPOConfig` or TRL's.
    `train_dataset` and `eval_dataset` are paths of files of rows, a `datasets.Dataset`, or iterables of dicts. `callbacks` are
    those of `transformers`. `peft_config` is a `peft.LoraConfig`. `processing_class` may be the processor or the tokenizer of the
    model, which is read from the checkpoint in any case.

    `tools` are functions that the model may call, with type hints and a docstring in Google's style. `environment_factory` makes
    environments with methods that the model may call; it may be a dict of factories, of which the column `environment` of a row
    chooses one. An environment has a method `reset(**columns)`, whose text is appended to the question, and may have `get_reward()`.
    """

    _config = GRPOConfig

    def __init__(self, model, reward_funcs=None, args=None, train_dataset=None, eval_dataset=None, callbacks=None, peft_config=None,
                 processing_class=None, tools=None, environment_factory=None):
        self.args = self._config() if args is None else self._config.of(args)
        if not isinstance(model, (str, os.PathLike)):
            raise TypeError(f"the model is a {type(model).__name__}, expected a checkpoint directory or a name on the hub; "
                            "save a model of torch with `save_pretrained`, and give its directory")
        own = getattr(getattr(processing_class, "tokenizer", processing_class), "name_or_path", os.fspath(model))
        if own != os.fspath(model):
            raise ValueError(f"processing_class is that of {own}, expected that of the model, {os.fspath(model)}")
        given = {**self.args.settings, "model_name_or_path": os.fspath(model)}
        self._settings, self._functions, self._environments = with_functions(given, reward_funcs, tools, environment_factory)
        if peft_config is not None:
            if type(peft_config).__name__ != "LoraConfig":
                raise TypeError(f"peft_config is a {type(peft_config).__name__}, expected a LoraConfig: adapters are LoRA")
            # PEFT's defaults differ from those of the program.
            size = {name: getattr(peft_config, name) for name in ("r", "lora_alpha", "lora_dropout")}
            self._settings.update(use_peft=True, **{**size, **_given(peft_config, type(peft_config)())})
        if train_dataset is None and environment_factory is not None:
            train_dataset = self._environments.questions(self.args.max_steps)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks or []]
        self.state = SimpleNamespace(global_step=0, epoch=0.0, max_steps=self.args.max_steps or -1, log_history=[], total_flos=0,
                                     is_world_process_zero=True, is_local_process_zero=True, is_hyper_param_search=False)
        self.control = SimpleNamespace(should_training_stop=False, should_log=False, should_save=False, should_evaluate=False)
        self._model = None
        for note in _omnigrpo.check(self._config._command, self._given(write=False)):
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

        Ctrl-C ends the run with a checkpoint; the same call resumes it. A second Ctrl-C raises at once. SIGTERM does the same and raises
        `SystemExit(75)`, unless the script has a handler of its own.

        Processes of `mpirun` train together. Under `torchrun`, and with `nproc_per_node`, the script is run again as such processes,
        and this process ends with their exit code.
        """
        if resume_from_checkpoint is not None:
            self._settings["resume_from_checkpoint"] = resume_from_checkpoint
        self._model, self.control.should_training_stop = None, False
        first = _omnigrpo.connect(self._config._command, self._given(), _again()) == 0
        self.state.is_world_process_zero = self.state.is_local_process_zero = first
        run = _Run(self)
        if run.progress.notebook:
            self._settings.setdefault("dashboard", True)
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

    def __init__(self, model, args=None, train_dataset=None, eval_dataset=None, callbacks=None, peft_config=None, processing_class=None):
        super().__init__(model, [], args, train_dataset, eval_dataset, callbacks, peft_config, processing_class)


def _again():
    """Return the command that runs this script again. It is empty in an interactive session."""
    if not os.path.exists(getattr(sys.modules["__main__"], "__file__", "")):
        return []
    return [sys.executable, *(sys.orig_argv[1:] if hasattr(sys, "orig_argv") else sys.argv)]


def plan(trainer):
    """Return the memory (bytes) and the time (seconds) that a trainer's run is expected to take, as `omnigrpo plan --json`."""
    command = "sft" if trainer._config._command == "sft" else "plan"
    return json.loads(_omnigrpo.plan(command, trainer._given(), Calls(trainer._functions, trainer._environments)))
