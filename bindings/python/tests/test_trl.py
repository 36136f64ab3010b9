"""Objects of TRL, peft, datasets and transformers, unchanged. Skipped where the packages are not installed."""

import json

import pytest

import omnigrpo


def needs(package):
    return pytest.importorskip(package, reason=f"NOT TESTED: objects of {package}, which is not installed; `pip install {package}`")


def _rows(demo):
    rows = [json.loads(line) for line in (demo / "data/train.jsonl").read_text().splitlines()]
    return [row for row in rows if "image" in row][:8]


def test_a_dataset_with_pictures_has_the_same_result_as_files(demo, start, tmp_path):
    datasets = needs("datasets")
    Image = pytest.importorskip("PIL.Image")
    rows = _rows(demo)
    text = [row["conversations"][0]["value"].replace("<image>", "").strip() for row in rows]
    turn = lambda text: [{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": text}]}]  # noqa: E731
    columns = {
        "prompt": [turn(question) for question in text],
        "image": [Image.open(demo / "data" / row["image"]).convert("RGB") for row in rows],
        "solution": [row["solution"] for row in rows],
    }
    dataset = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    files = [
        {"prompt": turn(question), "image": demo / "data" / row["image"], "solution": row["solution"]}
        for question, row in zip(text, rows)
    ]
    logs = []
    for name, rows in (("dataset", dataset), ("files", files)):
        trainer = start("accuracy", rows, folder=tmp_path / name, settings={"max_steps": 1})
        trainer.train()
        logs.append(trainer.state.log_history[0])
    assert (logs[0]["loss"], logs[0]["completions/mean_length"]) == (logs[1]["loss"], logs[1]["completions/mean_length"])


def test_trl_objects_are_taken_unchanged(demo, tmp_path):
    trl = needs("trl")
    peft = needs("peft")
    transformers = needs("transformers")
    from trl.rewards import think_format_reward

    logged = []

    class Keep(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logged.append((state.global_step, logs["reward"]))

    args = trl.GRPOConfig(
        output_dir=str(tmp_path), num_generations=4, per_device_train_batch_size=16, max_completion_length=12, max_steps=2,
        learning_rate=1e-4, bf16=False, report_to="none", logging_steps=1, use_cpu=True,
    )
    lora = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0)
    rewards = ["accuracy", think_format_reward]
    trainer = omnigrpo.GRPOTrainer(str(demo / "model"), rewards, args, demo / "data/train.jsonl", callbacks=[Keep()], peft_config=lora)
    assert trainer.train().global_step == 2
    assert [step for step, _ in logged] == [1, 2]
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
