"""Scripts as users of TRL write them: methods of trainers, callbacks, parsers, and examples of TRL's documents with other imports."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import omnigrpo
from omnigrpo import rewards

GOLDEN = Path(__file__).parents[3] / "crates/models/tests/golden/checkpoints"


def brief(completions, **kwargs):
    return [-float(len(completion[0]["content"])) for completion in completions]


@pytest.fixture
def held_out(demo):
    return {"eval_dataset": demo / "data/eval.jsonl"}


def test_a_finished_trainer_evaluates_saves_and_logs(start, tmp_path, held_out):
    seen = []

    class Watching:
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            seen.append(metrics)

        def on_log(self, args, state, control, logs, **kwargs):
            seen.append(logs)

    (tmp_path / "one.jsonl").write_text('{"prompt": "Which colour is it?", "solution": "red"}\n')
    trainer = start("accuracy", **held_out, settings={"allow_text_only": True})
    with pytest.raises(ValueError, match="there is no trained model yet: `train` writes it to"):
        trainer.save_model()
    before = trainer.evaluate()
    # A dataset of the call is not that of the run.
    assert trainer.evaluate(tmp_path / "one.jsonl")["eval_rows"] == 1 and trainer.evaluate()["eval_rows"] == 8
    trainer.state.log_history.clear()
    trainer.train()
    trainer.add_callback(Watching)
    found = trainer.evaluate()
    assert found["eval_rows"] == 8 and before.keys() == found.keys() and seen[1] == found
    assert trainer.state.log_history[-1] == {**found, "step": 3}
    # The model of the run directory, through the rewards of the trainer.
    alone = omnigrpo.evaluate(tmp_path / "run", held_out["eval_dataset"], "accuracy", max_completion_length=12, dtype="float32")
    assert found["eval_reward"] == alone["metrics"]["eval_reward"]
    assert {f"test_{name[5:]}" for name in found} == set(trainer.evaluate(metric_key_prefix="test"))

    trainer.save_model()
    trainer.save_model(str(trainer.args.output_dir))
    trainer.save_state()
    trainer.create_model_card()
    trainer.save_model(tmp_path / "copy")
    trainer.model.save_pretrained(tmp_path / "again")
    for copy in ("copy", "again"):
        assert (tmp_path / copy / "model.safetensors").read_bytes() == (tmp_path / "run/model.safetensors").read_bytes()
    with pytest.raises(TypeError, match="edit README.md"):
        trainer.create_model_card(model_name="mine")

    seen.clear()
    trainer.log({"mine": 1.5})
    assert seen == [{"mine": 1.5}] and trainer.state.log_history[-1] == {"mine": 1.5, "step": 3}
    own = trainer.callbacks[-1]
    assert trainer.pop_callback(Watching) is own and trainer.pop_callback(Watching) is None
    trainer.add_callback(own)
    trainer.remove_callback(own)
    assert own not in trainer.callbacks
    assert trainer.is_world_process_zero() and trainer.accelerator.is_main_process and trainer.hub_model_id == "run"
    trainer.end()


def test_adapters_are_evaluated_and_saved(start, tmp_path, held_out):
    trainer = start("accuracy", settings={"use_peft": True, "lora_r": 2}, **held_out)
    before = trainer.evaluate()
    trainer.train()
    trainer.save_model()
    found = trainer.evaluate()
    assert found.keys() == before.keys() and (tmp_path / "run/adapter_config.json").exists()
    alone = omnigrpo.evaluate(
        trainer._settings["model_name_or_path"], held_out["eval_dataset"], "accuracy", max_completion_length=12, dtype="float32",
        adapter_name_or_path=tmp_path / "run",
    )
    assert found["eval_reward"] == alone["metrics"]["eval_reward"]
    # Another trainer of the same folder begins with the model that it was given.
    assert start("accuracy", settings={"use_peft": True, "lora_r": 2}, **held_out).evaluate()["eval_reward"] == before["eval_reward"]


def test_an_evaluation_without_rows_says_what_to_give(start):
    with pytest.raises(ValueError, match="give `eval_dataset` to it or to the trainer"):
        start("accuracy").evaluate()


def test_named_evaluation_sets_have_their_own_numbers(start, demo, tmp_path):
    rows = [json.loads(line) for line in (demo / "data/eval.jsonl").read_text().splitlines()]
    for row in rows:
        row.update({name: str(demo / "data" / row[name]) for name in ("image", "video") if isinstance(row.get(name), str)})
    sets = {"easy": rows[:3], "hard": rows[3:]}
    trainer = start("accuracy", eval_dataset=sets, settings={"eval_strategy": "steps", "eval_steps": 3})
    trainer.train()
    own = [logged for logged in trainer.state.log_history if "eval_reward" in logged]
    assert own and own[-1]["eval_easy_rows"] == 3 and own[-1]["eval_hard_rows"] == 5
    mean = (3 * own[-1]["eval_easy_reward"] + 5 * own[-1]["eval_hard_reward"]) / 8
    assert own[-1]["eval_reward"] == pytest.approx(mean) and "eval_easy_accuracy" in own[-1]
    assert trainer.evaluate({"one": rows[:1], "two": rows[1:3]})["eval_two_rows"] == 2
    with pytest.raises(ValueError, match="eval_dataset has the name 'a b', expected letters"):
        start("accuracy", eval_dataset={"a b": rows}, folder=tmp_path / "odd").train()


def test_methods_of_trl_are_not_overridden_by_names_that_are_only_called(start):
    for name in ("evaluate", "save_model", "log", "push_to_hub", "compute_loss"):
        with pytest.raises(TypeError, match=f"My.{name} overrides a method of TRL that is never called here; use "):
            type("My", (omnigrpo.GRPOTrainer,), {name: lambda self: None})


def test_early_stopping_of_transformers_ends_the_run(start, held_out):
    transformers = pytest.importorskip("transformers", reason="NOT TESTED: callbacks of transformers, which is not installed")
    settings = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.0}
    stopping = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    trainer = start("accuracy", callbacks=[stopping], settings=settings, **held_out)
    trainer.train()
    # The first evaluation is the best one, since nothing is learned; the second and the third are no better.
    evaluated = [logged for logged in trainer.state.log_history if "eval_reward" in logged]
    assert trainer.state.global_step < 6 and trainer.state.best_metric == evaluated[0]["eval_reward"]


def test_arguments_that_have_no_place_here_are_refused_by_name(start):
    for name, value, other in [
        ("quantization_config", object(), "load_in_8bit"),
        ("optimizers", (object(), None), "learning_rate"),
        ("rollout_func", print, "tools"),
        ("reward_processing_classes", object(), "reward model by its directory"),
    ]:
        with pytest.raises(TypeError, match=f"{name} is unsupported, expected .*{other}"):
            start(brief, **{name: value})
    start(brief, quantization_config=None, optimizers=(None, None), reward_processing_classes=[None])
    start(brief, optimizers=None)


def test_a_parser_makes_configurations_from_arguments_and_a_file(tmp_path):
    pytest.importorskip("transformers", reason="NOT TESTED: the parser with data classes, since transformers is not installed")

    @dataclass
    class Own:
        dataset_name: str
        split: str = "train"

    file = tmp_path / "run.yaml"
    file.write_text("output_dir: runs/file\nlearning_rate: 2.0e-5\nnum_generations: 4\ndataset_name: rows\nenv:\n  OMNIGRPO_SEEN: '7'\n")
    parser = omnigrpo.TrlParser((Own, omnigrpo.GRPOConfig))
    own, args = parser.parse_args_and_config(["--config", str(file), "--learning-rate=1e-6", "--split", "test", "--bf16", "false", "--use_peft"])
    assert (own.dataset_name, own.split, os.environ.pop("OMNIGRPO_SEEN")) == ("rows", "test", "7")
    assert (args.learning_rate, args.num_generations, str(args.output_dir)) == (1e-6, 4, "runs/file")
    assert args.use_peft is True and args.to_dict()["learning_rate"] == 1e-6 and '"num_generations": 4' in args.to_json_string()
    with pytest.raises(ValueError, match="unknown arguments: --learning_rat, 1"):
        parser.parse_args_and_config(["--dataset_name", "x", "--learning_rat", "1"])
    *_, rest = parser.parse_args_and_config(["--dataset_name", "x", "--mine", "1"], return_remaining_strings=True)
    assert rest == ["--mine", "1"]
    (args,) = omnigrpo.TrlParser(omnigrpo.GRPOConfig).parse_args_and_config(["--output_dir", "2026", "--run_name", "1e5"])
    assert (str(args.output_dir), args.run_name) == ("2026", "1e5")
    with pytest.raises(TypeError, match="expected GRPOConfig, SFTConfig or data classes"):
        omnigrpo.TrlParser(print)


def test_the_soft_punishment_of_long_answers_is_that_of_its_equation():
    punish = rewards.get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=4)
    lengths = [1, 16, 17, 19, 20, 30]
    assert punish(completion_ids=[[0] * length for length in lengths]) == [0, 0, -0.25, -0.75, -1, -1]
    with pytest.raises(ValueError, match="soft_punish_cache is 0, expected a number of tokens from 1 to 20"):
        rewards.get_soft_overlong_punishment(20, 0)


# Three examples of TRL's page on GRPO: the first steps, a configuration that asks for vLLM, and rewards for tasks of their own.
FIRST = """
from datasets import load_dataset
from {package} import GRPOTrainer
from {package}.rewards import accuracy_reward

dataset = load_dataset({rows}, split="train")

trainer = GRPOTrainer(
    model={model},
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
"""
SCALE = """
import argparse

from datasets import load_dataset
from {package} import GRPOTrainer, GRPOConfig
from {package}.rewards import accuracy_reward

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm_server_host", type=str, default="", help="The server IP")
    args = parser.parse_args()

    dataset = load_dataset({rows}, split="train")

    training_args = GRPOConfig(
        per_device_train_batch_size=4,
        use_vllm=True,
        vllm_server_host=args.vllm_server_host.replace("ip-", "").replace("-", "."),
    )

    trainer = GRPOTrainer(
        model={model},
        args=training_args,
        reward_funcs=accuracy_reward,
        train_dataset=dataset
    )
    trainer.train()

if __name__=="__main__":
    main()
"""
TASKS = """
from datasets import Dataset
from {package} import GRPOTrainer

dataset = Dataset.from_list(
    [
        {{"prompt": "What is 2+2?", "task": "math"}},
        {{"prompt": "Write a function that returns the sum of two numbers.", "task": "code"}},
    ]
)

def math_reward_func(prompts, completions, task, **kwargs):
    return [1.0 if "4" in completion else -1.0 if own == "math" else None for completion, own in zip(completions, task)]

def coding_reward_func(prompts, completions, task, **kwargs):
    return [(1.0 if "def" in completion else -1.0) if own == "code" else None for completion, own in zip(completions, task)]

trainer = GRPOTrainer(
    model={model},
    reward_funcs=[math_reward_func, coding_reward_func],
    train_dataset=dataset,
)

trainer.train()
"""


@pytest.mark.parametrize("example", [FIRST, SCALE, TASKS], ids=["first", "scale", "tasks"])
def test_examples_of_trls_page_run_with_other_imports_model_and_rows(tmp_path, example):
    pytest.importorskip("datasets", reason="NOT TESTED: examples of TRL's page, since datasets is not installed")
    rows = [{"prompt": [{"role": "user", "content": f"What is {a}+{a}?"}], "solution": str(2 * a)} for a in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    load = f'"json", data_files={str(tmp_path / "rows.jsonl")!r}'
    script = tmp_path / "script.py"
    script.write_text(example.format(package="omnigrpo", rows=load, model=repr(str(GOLDEN / "qwen2"))))
    path = os.pathsep.join([str(Path(omnigrpo.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path, "HF_HOME": str(tmp_path / "hf")}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = list(tmp_path.glob("**/metrics.jsonl"))
    steps = [json.loads(line) for line in runs[0].read_text().splitlines()]
    assert len(runs) == 1 and len(steps) >= 1 and (runs[0].parent / "model.safetensors").exists()
