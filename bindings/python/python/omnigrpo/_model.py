"""Models that answer and score, and evaluations."""

import json
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from . import _omnigrpo
from ._calls import Calls, with_functions
from ._rows import Folder, dumps, file_of


class Model:
    """A checkpoint with its weights in memory. `del` frees them."""

    def __init__(self, path, *, _inner=None, **settings):
        self._settings = {"model_name_or_path": os.fspath(path), **settings}
        self._inner = _inner or _omnigrpo.Model(dumps(self._settings))
        self._scratch = tempfile.mkdtemp(prefix="omnigrpo-")
        weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)

    @classmethod
    def load(cls, path, **settings):
        """Read a checkpoint directory, or a model by its name on the Hugging Face hub.

        `settings` are those of `omnigrpo generate`, such as `dtype="bfloat16"`, `device="cuda"`, `load_in_8bit=True`.
        """
        return cls(path, **settings)

    def generate(self, rows, **settings):
        """Sample completions of rows.

        `rows` are dicts as in a dataset, or questions. `settings` are those of `omnigrpo generate`, such as `num_generations=4`,
        `temperature=0`, `max_completion_length=64` (tokens).

        Returns one list per row with `num_generations` dicts: `text`, `completion_ids` [tokens], `logprobs` [tokens] in nats at
        temperature 1, and `finish_reason` ("stop" or "length").
        """
        folder = Folder(self._scratch)
        rows = dumps([folder.row(row) for row in rows])
        return json.loads(self._inner.generate(rows, dumps({**self._settings, **settings}), Path.cwd()))

    def score(self, row, completions, **settings):
        """Return the log-probabilities of given completions of one row, in nats: a list of tokens per completion."""
        row = dumps(Folder(self._scratch).row(row))
        return self._inner.score(row, list(completions), dumps({**self._settings, **settings}), Path.cwd())

    def save(self, directory):
        """Write a checkpoint directory in the layout of the Hugging Face hub."""
        self._inner.save(Path(directory))

    def save_pretrained(self, directory):
        """Write a checkpoint directory, as `save` does."""
        self.save(directory)


def evaluate(model, dataset, reward_funcs="accuracy", tools=None, environment_factory=None, **settings):
    """Answer the rows of a dataset with a model, greedily unless `settings` say otherwise, and score the answers.

    `model` is a checkpoint directory or a name on the hub. `tools` and `environment_factory` are as in `GRPOTrainer`. Returns
    `{"metrics": {…}, "rows": […], "skipped": n}` with the metrics of `omnigrpo eval`, such as `eval_accuracy` (a share of 1).
    """
    settings, functions, environments = with_functions(settings, reward_funcs, tools, environment_factory)
    with tempfile.TemporaryDirectory(prefix="omnigrpo-") as scratch:
        settings = {"model_name_or_path": os.fspath(model), "eval_file": [file_of(dataset, scratch, "eval")], **settings}
        return json.loads(_omnigrpo.evaluate(dumps(settings), Calls(functions, environments)))
