"""TRL's trainers and their configuration."""

import atexit
import dataclasses
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from . import _omnigrpo
from ._callbacks import Callbacks, Control
from ._calls import Calls, with_functions
from ._identity import digest
from ._model import Model
from ._processor import changed
from ._progress import Progress
from ._rows import dumps, file_of

_properties = json.loads(_omnigrpo.schema())["properties"]
# Fields of `transformers.TrainingArguments` that callbacks read, with the value that describes this program.
_FIXED = {"load_best_model_at_end": False, "greater_is_better": True, "model_init_kwargs": None, "trust_remote_code": False}
# A process has to leave the other ranks before it ends.
atexit.register(_omnigrpo.leave)


class GRPOConfig:
    """Settings of a run, by name. Most names are those of TRL. What is not given has its default.

    `per_device_train_batch_size` counts prompts, each with `num_generations` completions, unless `batch_unit="completions"`.
    A setting may also be assigned later: `args.learning_rate = 1e-5`. None stands for the default.

    """

    _command = "train"

    def __init__(self, output_dir="runs/python", *, disable_tqdm=False, **settings):
        self.settings = {name: value for name, value in settings.items() if value is not None}
        self.output_dir, self.disable_tqdm = output_dir, disable_tqdm
        self._check(self.settings, TypeError)

    def _check(self, settings, unknown):
        try:
            _omnigrpo.read(self._command, dumps(settings))
        except ValueError as error:
            if "unknown setting" in str(error):
                raise unknown(str(error)) from None
            raise

    def __setattr__(self, name, value):
        if name == "output_dir":
            value = Path(value)
        if name in ("output_dir", "disable_tqdm", "settings"):
            self.__dict__[name] = value
        elif name == "model_init_kwargs":
            # Scripts of TRL say here how `transformers` loads the model.
            own = {key: one for key, one in (value or {}).items() if one is not None and key in _properties}
            self._check(own, AttributeError)
            self.settings.update(own)
            lost = sorted(key for key, one in (value or {}).items() if one not in (None, False) and key not in own)
            if lost:
                warnings.warn(f"model_init_kwargs: {', '.join(lost)} has no effect here", stacklevel=2)
        elif value is None:
            if name not in _properties:
                raise AttributeError(f"{name} is no setting")
            self.settings.pop(name, None)
        else:
            self._check({name: value}, AttributeError)
            self.settings[name] = value

    def __getattr__(self, name):
        if name in self.__dict__.get("settings", {}):
            return self.settings[name]
        if name in _FIXED:
            return _FIXED[name]
        if name not in _properties:
            raise AttributeError(name)
        return _properties[name].get("default")

    def to_dict(self):
        """Return the settings that were given, with `output_dir`."""
        return {"output_dir": str(self.output_dir), **self.settings}

    def to_json_string(self):
        """Return `to_dict` as JSON."""
        return json.dumps(json.loads(dumps(self.to_dict())), indent=2)

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
        given.update(given.pop("model_init_kwargs", {}) or {})
        # TRL computes it from `steps_per_generation`, or the reverse.
        given.pop("generation_batch_size", None)
        return cls(args.output_dir, preset="trl", **given)


def _given(config, default):
    """Return what was given to a dataclass: attributes that it lacks by itself, and fields that are neither the default nor made of it."""
    fields = {field.name for field in dataclasses.fields(config)}
    own = fields | vars(default).keys()
    values = {name: value for name, value in vars(config).items() if name not in own and not name.startswith("_")}
    for field in dataclasses.fields(config):
        value, own = getattr(config, field.name), getattr(default, field.name)
        written = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if value is not None and value not in (own, written):
            values[field.name] = value
    return values


class SFTConfig(GRPOConfig):
    """Settings of supervised fine-tuning, by the names of `docs/generated/flags.md`."""

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
        self.state, self.control, self.call, self.trainer, self.steps = trainer.state, trainer.control, trainer._call, trainer, 0

    def _logged(self, report):
        logs = {name: value for name, value in report["metrics"].items() if value is not None}
        self.state.log_history.append({**logs, "step": report["step"]})
        return logs

    def restore(self, steps):
        """Add the numbers of the steps before those of this process to the log. Other processes than the first have none."""
        if not self.state.is_world_process_zero:
            return
        file = self.trainer.args.output_dir / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
        earlier = [{name: value for name, value in row.items() if value is not None} for row in rows if row["step"] <= steps]
        self.state.log_history[:0] = earlier

    def on_step(self, _, report):
        if self.steps == 0:
            self.restore(report["step"] - 1)
        self.steps += 1
        logs, before = self._logged(report), int(self.state.epoch or 0)
        self.state.global_step, self.state.epoch = report["step"], logs.get("epoch", self.state.epoch)
        self.progress.rewards += [logs["reward"]] if "reward" in logs else []
        if self.steps == 1:
            self.call("on_epoch_begin")
        self.call("on_step_begin")
        self.call("on_step_end")
        self.call("on_log", logs=logs)
        if int(self.state.epoch or 0) > before:
            self.call("on_epoch_end")
            if self.state.global_step != self.state.max_steps:
                self.call("on_epoch_begin")
        return self._asked()

    def _asked(self):
        asked = self.control.take()
        if asked["evaluate"] and not self.trainer.evaluates:
            raise ValueError("a callback has set control.should_evaluate, expected rows to evaluate on: give `eval_dataset` or `val_split_ratio`")
        return asked

    def on_save(self, _, report):
        self.call("on_save")

    def on_evaluation(self, _, report):
        metrics = self._logged(report)
        self.call("on_evaluate", metrics=metrics)
        # Callbacks compare an evaluation with the best one before it.
        name = str(self.trainer.args.metric_for_best_model)
        value = metrics.get(name if name.startswith("eval_") else f"eval_{name}")
        if value is not None and (self.state.best_metric is None or value > self.state.best_metric):
            self.state.best_metric, self.state.best_global_step = value, report["step"]
        return self._asked()


# Methods of TRL's trainers and of `transformers.Trainer`, which a subclass may override there, and what does their work here.
_REPLACED = {
    "the settings of the loss (`loss_type`, `beta`, `epsilon`, …)": ("compute_loss", "_compute_loss", "compute_loss_context_manager"),
    "callbacks with `on_step_begin` and `on_step_end`": ("training_step", "_inner_training_loop", "_maybe_log_save_evaluate"),
    "a callback with `on_log`, or `log_metric` and `log_extra` in a reward": ("log", "_log_completions"),
    "`train_dataset`, an iterable of rows, and the settings `shuffle_dataset`, `curriculum` and `dataloader_num_workers`": (
        "get_train_dataloader", "get_batch_samples", "_get_train_sampler", "_get_dataloader", "_prepare_inputs", "_prepare_input",
        "_set_signature_columns_if_needed",
    ),
    "`eval_dataset` and the settings `eval_strategy` and `eval_steps`; `omnigrpo.evaluate` evaluates a checkpoint": (
        "get_eval_dataloader", "get_test_dataloader", "_get_eval_sampler", "evaluate", "evaluation_loop", "prediction_loop",
        "prediction_step", "predict",
    ),
    "rewards, `tools` and `environment_factory`, and the settings of sampling": (
        "_generate_and_score_completions", "_generate", "_generate_single_turn", "_calculate_rewards", "_tool_call_loop",
        "_get_per_token_logps_and_entropies", "_get_last_hidden_state",
    ),
    "the settings of the optimizer (`learning_rate`, `lr_scheduler_type`, …)": (
        "create_optimizer", "create_scheduler", "create_optimizer_and_scheduler", "get_decay_parameter_names",
        "get_optimizer_cls_and_kwargs",
    ),
    "the settings `save_strategy`, `save_steps` and `save_total_limit`, and a callback with `on_save`": (
        "save_model", "_save", "_save_checkpoint", "_load_from_checkpoint", "_load_best_model", "create_model_card", "push_to_hub",
    ),
    "a setting or a callback": (
        "autocast_smart_context_manager", "floating_point_ops", "hyperparameter_search", "num_examples", "store_flos", "init_hf_repo",
    ),
}


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

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        instead = {name: what for what, names in _REPLACED.items() for name in names}
        # A method that the installed TRL has and this page does not know is refused as well.
        theirs = getattr(sys.modules.get("trl.trainer.grpo_trainer"), "GRPOTrainer", object)
        for name in vars(cls):
            known = hasattr(theirs, name) and not hasattr(object, name) and not hasattr(GRPOTrainer, name)
            if known or name in instead:
                raise TypeError(f"{cls.__name__}.{name} overrides a method of TRL that is never called here; "
                                f"use {instead.get(name, 'a setting or a callback')}")

    def __init__(self, model, reward_funcs=None, args=None, train_dataset=None, eval_dataset=None, callbacks=None, peft_config=None,
                 processing_class=None, tools=None, environment_factory=None, *, reward_processing_classes=None, optimizers=(None, None),
                 rollout_func=None, quantization_config=None):
        instead = {
            "reward_processing_classes": (_some(reward_processing_classes), "a reward model by its directory, which has its tokenizer"),
            "optimizers": (_some(optimizers), "`learning_rate`, `lr_scheduler_type` and `adam_beta1`"),
            "rollout_func": (rollout_func, "`tools` or `environment_factory`"),
            "quantization_config": (quantization_config, "the settings `load_in_8bit` or `load_in_4bit`"),
        }
        for name, (value, other) in instead.items():
            if value is not None:
                raise TypeError(f"{name} is unsupported, expected {other}")
        self.args = self._config() if args is None else self._config.of(args)
        if not isinstance(model, (str, os.PathLike)):
            raise TypeError(f"the model is a {type(model).__name__}, expected a checkpoint directory or a name on the hub; "
                            "save a model of torch with `save_pretrained`, and give its directory")
        own = getattr(getattr(processing_class, "tokenizer", processing_class), "name_or_path", os.fspath(model))
        if own != os.fspath(model):
            raise ValueError(f"processing_class is that of {own}, expected that of the model, {os.fspath(model)}")
        differing = changed(processing_class) if processing_class is not None else []
        if differing:
            raise ValueError(f"processing_class differs from {own} in {', '.join(differing)}, expected what the files of the model say; "
                             "write it beside the weights with `save_pretrained`, or use a setting such as `max_pixels` or "
                             "`chat_template_kwargs`")
        self._assigned = dict(self.args.settings)
        # A prompt that is a text is continued as it stands, as in TRL.
        templated = self.args.settings.get("system_prompt") or self.args.settings.get("environment") or tools or environment_factory
        texts = {} if templated else {"continue_text_prompts": True}
        given = {**texts, **self.args.settings, "model_name_or_path": os.fspath(model)}
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
        self._callbacks = Callbacks(callbacks)
        self.processing_class = processing_class
        self.state = SimpleNamespace(global_step=0, epoch=0.0, max_steps=self.args.max_steps or -1, log_history=[], total_flos=0,
                                     is_world_process_zero=True, is_local_process_zero=True, is_hyper_param_search=False,
                                     best_metric=None, best_global_step=None, best_model_checkpoint=None)
        self.control = Control()
        self._model = None
        self._digests = {name: digest(function) for name, function in self._functions.items()}
        self._digests.update({f"tool {at}": digest(tool) for at, tool in enumerate(tools or ())})
        if environment_factory is not None:
            self._digests["environment"] = digest(environment_factory)
        for note in _omnigrpo.check(self._config._command, self._given(write=False)):
            warnings.warn(note, stacklevel=2)
        self._call("on_init_end")

    @property
    def callbacks(self):
        """The callbacks."""
        return self._callbacks.own

    @property
    def evaluates(self):
        """Whether the run has rows to evaluate on."""
        names = ("eval_file", "eval_dataset_use", "val_split_ratio")
        return self.eval_dataset is not None or any(self.args.settings.get(name) for name in names)

    def _call(self, event, **kwargs):
        self._callbacks.call(self, event, **kwargs)

    def _given(self, write=True):
        """Return all settings, with rows as files of the run directory, which are written unless `write` is false."""
        # Settings that were assigned to `args` after this trainer was made.
        assigned = {name: self.args.settings.get(name) for name in {*self._assigned, *self.args.settings}}
        later = {name: value for name, value in assigned.items() if value != self._assigned.get(name)}
        given = {**self._settings, **later, "output_dir": str(self.args.output_dir)}
        given = {name: value for name, value in given.items() if value is not None}
        for name in ("train", "eval"):
            rows = getattr(self, f"{name}_dataset")
            if rows is None:
                continue
            if write:
                # An iterator can be read only once, so that the file replaces it.
                rows = _written(rows, name, self.args.output_dir / "rows")
                setattr(self, f"{name}_dataset", rows)
            files = rows.values() if isinstance(rows, Mapping) else [rows]
            given[f"{name}_file"] = [one if isinstance(one, (str, os.PathLike)) else f"{name}.jsonl" for one in files]
        if _runs_python(given):
            given.setdefault("reward_python", sys.executable)
        return dumps(given)

    def add_callback(self, callback):
        """Add a callback, or a class of callbacks."""
        self._callbacks.own += Callbacks([callback]).own

    def pop_callback(self, callback):
        """Remove a callback, or the first one of a class, and return it; None if there is none."""
        found = [one for one in self._callbacks.own if one is callback or type(one) is callback]
        self._callbacks.own = [one for one in self._callbacks.own if not found or one is not found[0]]
        return found[0] if found else None

    def remove_callback(self, callback):
        """Remove a callback, or the first one of a class."""
        self.pop_callback(callback)

    def log(self, logs, start_time=None):
        """Add numbers to `state.log_history`, and give them to the callbacks."""
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._call("on_log", logs=dict(logs))

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """Answer rows with the model that `train` has written to `output_dir`, or before that with the model that was given.

        Answers are greedy, or `num_generations_eval` samples of each row. The rewards are those of the trainer. Rows are those of
        `eval_dataset`, or of the trainer. Returns metrics such as `eval_reward`; for a dict of datasets, `eval_NAME_reward` and so on.
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if rows is None:
            raise ValueError("evaluate needs rows: give `eval_dataset` to it or to the trainer")
        given = json.loads(self._given(write=False))
        if self._model is not None:
            name = "adapter_name_or_path" if (self.args.output_dir / "adapter_config.json").exists() else "model_name_or_path"
            given[name] = str(self.args.output_dir)
        samples = given.get("num_generations_eval", 1)
        others = {"output_dir", "train_file", "eval_file", "num_generations", *(("temperature", "top_p", "top_k", "min_p") if samples == 1 else ())}
        settings = {name: value for name, value in given.items() if name not in others and self._evaluates(name, value)}
        settings.update({"num_generations": samples} if samples > 1 else {})
        # The rows of the run stay as they are.
        with tempfile.TemporaryDirectory(prefix="omnigrpo-") as scratch:
            files = _written(rows, "eval", Path(scratch))
            settings["eval_file"] = list(files.values()) if isinstance(files, Mapping) else [files]
            found = json.loads(_omnigrpo.evaluate(dumps(settings), Calls(self._functions, self._environments)))["metrics"]
        found = {name: value for name, value in found.items() if value is not None}
        if metric_key_prefix != "eval":
            found = {f"{metric_key_prefix}_{name.removeprefix('eval_')}": value for name, value in found.items()}
        self.log(found)
        self._call("on_evaluate", metrics=found)
        return found

    @staticmethod
    def _evaluates(name, value):
        """Return whether an evaluation has this setting."""
        try:
            _omnigrpo.read("eval", dumps({name: value}))
        except ValueError:
            return False
        return True

    def save_model(self, output_dir=None):
        """Write the model to a directory, in the layout of the Hugging Face hub. `train` writes it to `args.output_dir` itself."""
        there = any((self.args.output_dir / name).exists() for name in ("config.json", "adapter_config.json"))
        if not self.state.is_world_process_zero:
            return
        if output_dir is not None and Path(output_dir).resolve() != self.args.output_dir.resolve():
            self.model.save(output_dir)
        elif self._model is None and not there:
            raise ValueError(f"there is no trained model yet: `train` writes it to {self.args.output_dir}")

    @property
    def accelerator(self):
        """What scripts of TRL use of it: `print` and `is_main_process`."""
        first = self.state.is_world_process_zero
        return SimpleNamespace(is_main_process=first, is_local_main_process=first, print=print if first else lambda *args, **kwargs: None)

    @property
    def hub_model_id(self):
        """The repository of `push_to_hub`."""
        return self.args.hub_model_id or self.args.output_dir.resolve().name

    def is_world_process_zero(self):
        """Return whether this process is the first one."""
        return self.state.is_world_process_zero

    def end(self):
        """Do nothing: `train` has closed its trackers."""

    def save_state(self):
        """Do nothing: `train` writes the state of the run to `output_dir`, with each checkpoint and at the end."""

    def create_model_card(self, *args, **kwargs):
        """Do nothing: `train` writes a model card, `README.md`, with the settings, the data and the results."""
        if args or kwargs:
            raise TypeError("the model card is made from the settings of the run; to change it, edit README.md in `output_dir`")

    def push_to_hub(self, **kwargs):
        """Push the trained model to the Hugging Face hub, to `hub_model_id`, or to a repository with the name of the run directory."""
        if kwargs:
            # TRL's scripts give the name of the dataset for the model card.
            warnings.warn(f"push_to_hub: {', '.join(kwargs)} has no effect; the model card has the names of the data", stacklevel=2)
        if not self.state.is_world_process_zero:
            return
        settings = {name: self.args.settings[name] for name in ("hub_model_id", "hub_private_repo") if name in self.args.settings}
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        if _omnigrpo.main(["omnigrpo", "push", str(self.args.output_dir), *words], []) != 0:
            raise _omnigrpo.OmnigrpoError("the model was not pushed; the lines above say why")

    def train(self, resume_from_checkpoint=None):
        """Train to the end.

        If `output_dir` contains an unfinished run with the same settings, rows, model and functions, that run is resumed. Any other
        run there is moved to `superseded-N` in it, and training starts from the beginning. Both are said in a line.
        `resume_from_checkpoint=True` resumes the newest checkpoint, `"never"` starts from the beginning.

        Ctrl-C ends the run with a checkpoint; the same call resumes it. A second Ctrl-C raises at once. SIGTERM does the same and raises
        `SystemExit(75)`, unless the script has a handler of its own.

        Processes of `mpirun` train together. Under `torchrun`, and with `nproc_per_node`, the script is run again as such processes,
        and this process ends with their exit code.
        """
        if resume_from_checkpoint is not None:
            self._settings["resume_from_checkpoint"] = resume_from_checkpoint
        self._model, self.control.should_training_stop = None, False
        self.state.log_history, self.state.global_step, self.state.epoch = [], 0, 0.0
        self.state.best_metric = self.state.best_global_step = None
        self.state.max_steps = self.args.max_steps or -1
        first = _omnigrpo.connect(self._config._command, self._given(), _again()) == 0
        self.state.is_world_process_zero = self.state.is_local_process_zero = first
        run = _Run(self)
        if run.progress.notebook:
            self._settings.setdefault("dashboard", True)
        self._call("on_train_begin")
        try:
            done, model = _omnigrpo.train(self._config._command, self._given(), self._digests, resume_from_checkpoint is None, run)
            done = json.loads(done)
            run.progress.finish(done["steps"])
        finally:
            run.progress.close()
        if run.steps == 0 and not done["interrupted"]:
            run.restore(done["steps"])
            self.state.global_step = done["steps"]
            run.progress.line(f"the run in {self.args.output_dir} is complete: nothing was trained")
        self._model = Model(self._settings["model_name_or_path"], _inner=model)
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


def _written(rows, name, folder):
    """Return the file of a dataset, or a dict of files of named datasets."""
    if not isinstance(rows, Mapping):
        return file_of(rows, folder, name)
    for own in rows:
        if not str(own).isidentifier() or own in ("accuracy", "format", "total"):
            raise ValueError(f"{name}_dataset has the name {own!r}, expected letters, digits and `_` that are no other name of a metric")
    return {own: file_of(one, folder / name, own) for own, one in rows.items()}


def _runs_python(settings):
    """Return whether a run with these settings starts an interpreter, which is then this one."""
    words = [word for name in ("report_to", "reward_funcs", "environment") for word in _words(settings.get(name))]
    return any(word in ("wandb", "trackio", "all") or ".py:" in word for word in words)


def _some(value):
    """Return a value, or what a list has besides None."""
    return next((one for one in value if one is not None), None) if isinstance(value, (list, tuple)) else value


def _words(value):
    return [str(one) for one in value] if isinstance(value, (list, tuple)) else str(value or "").split(",")


def _again():
    """Return the command that runs this script again. It is empty in an interactive session."""
    if not os.path.exists(getattr(sys.modules["__main__"], "__file__", "")):
        return []
    return [sys.executable, *(sys.orig_argv[1:] if hasattr(sys, "orig_argv") else sys.argv)]


def plan(trainer):
    """Return the memory (bytes) and the time (seconds) that a trainer's run is expected to take, as `omnigrpo plan --json`."""
    command = "sft" if trainer._config._command == "sft" else "plan"
    return json.loads(_omnigrpo.plan(command, trainer._given(), Calls(trainer._functions, trainer._environments)))
