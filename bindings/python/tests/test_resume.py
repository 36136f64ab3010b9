"""A run resumes with another value of each setting that is free, and ends with the same weights, as in the program and in the library."""

import json
import pathlib
import shutil

import pytest

import omnigrpo

TABLE = json.loads((pathlib.Path(__file__).parents[3] / "crates/omnigrpo/tests/program/free.json").read_text())

# Arguments of the trainer, places of files that only the tests of the program have, and what cannot change within a process.
ELSEWHERE = {"model_name_or_path", "resume_from_checkpoint", "config", "deepspeed", "threads", "bf16_products", "report_to"}
# Settings that change the order of sums.
ROUNDING = {"max_stream_tokens", "gradient_checkpointing"}

SIMPLE = [(name, value) for name, value, given in TABLE if not given and name not in ELSEWHERE and ".jsonl" not in value]


def letters(completions, **_):
    return [float(len(completion[0]["content"]) % 7) for completion in completions]


def train(demo, folder, steps, **others):
    settings = {
        "num_generations": 2,
        "max_completion_length": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "save_steps": 1,
        "dtype": "float32",
    }
    args = omnigrpo.GRPOConfig(folder, **{**settings, "max_steps": steps, **others})
    trainer = omnigrpo.GRPOTrainer(demo / "model", letters, args, demo / "data/train.jsonl")
    trainer.train()
    assert trainer.state.global_step == steps
    return (folder / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def runs(demo, tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    train(demo, place / "part", 2)
    return train(demo, place / "whole", 3), place / "part"


def test_the_table_has_settings():
    assert len(SIMPLE) >= 25


@pytest.mark.parametrize(("name", "value"), SIMPLE)
def test_a_free_setting_may_change(name, value, demo, runs, tmp_path, capfd):
    whole, part = runs
    shutil.copytree(part, tmp_path / "run")
    weights = train(demo, tmp_path / "run", 3, **{name: value})
    assert "resuming from" in capfd.readouterr().err
    assert name in ROUNDING or weights == whole
