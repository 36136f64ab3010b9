"""Objects of TRL, peft, datasets and transformers, unchanged. Skipped where the packages are not installed."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import omnigrpo
from omnigrpo import _rows

PAGE = Path(__file__).parents[3] / "docs/python.md"


def needs(package):
    return pytest.importorskip(package, reason=f"NOT TESTED: objects of {package}, which is not installed; `pip install {package}`")


def rows_of(demo):
    rows = [json.loads(line) for line in (demo / "data/train.jsonl").read_text().splitlines()]
    return [row for row in rows if "image" in row][:8]


def test_a_dataset_with_pictures_has_the_same_result_as_files(demo, start, tmp_path):
    datasets = needs("datasets")
    Image = pytest.importorskip("PIL.Image")
    rows = rows_of(demo)
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


def trl_config(trl, folder, **others):
    settings = {
        "num_generations": 4, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "max_completion_length": 12,
        "max_steps": 2, "learning_rate": 1e-4, "bf16": False, "report_to": "none", "logging_steps": 1, "use_cpu": True,
        "disable_tqdm": True, "save_strategy": "no",
    }
    return trl.GRPOConfig(output_dir=str(folder), **{**settings, **others})


def test_trl_objects_are_taken_unchanged(demo, tmp_path, recwarn):
    trl, peft, transformers = needs("trl"), needs("peft"), needs("transformers")
    from trl.rewards import think_format_reward

    logged = []

    class Keep(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logged.append((state.global_step, args.num_generations, logs["reward"]))

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3

    path = str(demo / "model")
    callbacks = [Keep(), Stop, transformers.PrinterCallback(), transformers.ProgressCallback()]
    lora = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    trainer = omnigrpo.GRPOTrainer(
        path, ["accuracy", think_format_reward], trl_config(trl, tmp_path, max_steps=9), demo / "data/train.jsonl", callbacks=callbacks,
        peft_config=lora, processing_class=transformers.AutoTokenizer.from_pretrained(path),
    )
    assert trainer.train().global_step == 3
    assert [entry[:2] for entry in logged] == [(1, 4), (2, 4), (3, 4)]
    base = transformers.AutoModelForImageTextToText.from_pretrained(path)
    saved = peft.PeftModel.from_pretrained(base, tmp_path / "checkpoint-3").peft_config["default"]
    assert (saved.r, saved.lora_alpha, {name.rpartition(".")[2] for name in saved.target_modules}) == (4, 8, {"q_proj", "v_proj"})
    named = [str(warning.message) for warning in recwarn if "counterpart" in str(warning.message)]
    assert len(named) == 1 and "bf16 false" in named[0], named


def test_what_cannot_be_taken_is_named(demo, tmp_path):
    trl, peft, transformers = needs("trl"), needs("peft"), needs("transformers")
    rows, model = demo / "data/train.jsonl", str(demo / "model")
    with pytest.warns(UserWarning, match="(?s)no counterpart.*torch_empty_cache_steps"):
        omnigrpo.GRPOTrainer(model, "accuracy", trl_config(trl, tmp_path, torch_empty_cache_steps=5), rows)
    with pytest.raises(ValueError, match="(?s)`use_dora` is unsupported.*got: true"):
        omnigrpo.GRPOTrainer(model, "accuracy", trl_config(trl, tmp_path), rows, peft_config=peft.LoraConfig(use_dora=True))
    with pytest.raises(ValueError, match="(?s)`rank_pattern` is unsupported.*q_proj"):
        omnigrpo.GRPOTrainer(model, "accuracy", trl_config(trl, tmp_path), rows, peft_config=peft.LoraConfig(rank_pattern={"q_proj": 2}))
    with pytest.raises(TypeError, match="peft_config is a IA3Config, expected a LoraConfig"):
        omnigrpo.GRPOTrainer(model, "accuracy", trl_config(trl, tmp_path), rows, peft_config=peft.IA3Config())
    with pytest.raises(TypeError, match="save_pretrained"):
        omnigrpo.GRPOTrainer(transformers.AutoModelForImageTextToText.from_pretrained(model), "accuracy", None, rows)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.name_or_path = "other/model"
    with pytest.raises(ValueError, match="processing_class is that of other/model"):
        omnigrpo.GRPOTrainer(model, "accuracy", None, rows, processing_class=tokenizer)


def pictured(demo, count):
    """Return rows of the demo as TRL has them, with pictures in a dataset."""
    datasets, Image = needs("datasets"), pytest.importorskip("PIL.Image")
    rows = []
    for number, row in enumerate(rows_of(demo)[:count]):
        question = row["conversations"][0]["value"].replace("<image>", "").strip()
        picture = Image.open(demo / "data" / row["image"]).convert("RGB")
        rows.append({"prompt": [{"role": "user", "content": question}], "image": picture, "solution": row["solution"], "number": number})
    return datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())


def test_the_first_step_beside_trl_is_the_same(demo, tmp_path):
    """Both trainers get the same rows, settings and reward. omnigrpo replays TRL's completions, so that nothing is drawn twice."""
    trl, transformers = needs("trl"), needs("transformers")
    rows, model, asked = pictured(demo, 4), str(demo / "model"), []

    def brief(prompts, completions, completion_ids, number, **kwargs):
        values = [-float(len(completion[0]["content"])) for completion in completions]
        asked.extend(zip(number, completion_ids, values))
        return values

    # TRL fails on a batch with prompts of unequal lengths in this family, so a batch has one prompt.
    args = trl_config(
        trl, tmp_path / "trl", max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=4, steps_per_generation=1,
        loss_type="grpo", beta=0.0, weight_decay=0.0, gradient_checkpointing=False, dataloader_pin_memory=False, seed=3,
        model_init_kwargs={"dtype": "float32"},
    )
    processor = transformers.AutoProcessor.from_pretrained(model)
    peer = trl.GRPOTrainer(model, brief, args, rows, processing_class=processor)
    peer.train()
    theirs = peer.state.log_history[0]
    assert len(asked) == 16 and theirs["grad_norm"] > 0

    lines = []
    for number, row in enumerate(rows):
        own = [(ids, value) for at, ids, value in asked if at == number]
        lines.append({**row, "completions": [{"completion_ids": ids} for ids, _ in own], "rewards": [value for _, value in own]})
    config = omnigrpo.GRPOConfig.of(args)
    replay = _rows.file_of(lines, tmp_path, "replay")
    trainer = omnigrpo.GRPOTrainer(model, [], omnigrpo.GRPOConfig(tmp_path / "own", replay=replay, **config.settings), processing_class=processor)
    trainer.train()
    ours = trainer.state.log_history[0]
    for name, bound in (("loss", 1e-6), ("reward", 1e-6), ("entropy", 1e-5), ("completions/mean_length", 0)):
        assert ours[name] == pytest.approx(theirs[name], abs=bound), name
    # TRL's is the mean over its batches, and each of them is a group.
    assert ours["reward_std/group"] == pytest.approx(theirs["reward_std"], abs=1e-5)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


@pytest.mark.skipif(not PAGE.exists(), reason="the tests run outside of the repository")
def test_the_lines_of_the_page_run_in_both(demo, tmp_path):
    """Both get the same rows, reward and settings, and log the same names. Completions are drawn with other random numbers."""
    needs("trl")
    (code,) = re.findall(r"```python\n(from omnigrpo import .*?)```", PAGE.read_text(), re.S)
    env = {**os.environ, "PYTHONPATH": str(Path(omnigrpo.__file__).resolve().parents[1])}
    logs = []
    for name, lines in (
        ("omnigrpo", code),
        ("trl", code.replace("from omnigrpo import", "from datasets import Dataset\nfrom trl import").replace(", rows)", ", Dataset.from_list(rows))")),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "demo").symlink_to(demo)
        done = subprocess.run([sys.executable, "-c", lines], cwd=tmp_path / name, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        logs.append([step for step in ast.literal_eval(done.stdout.splitlines()[-1]) if "loss" in step])
    ours, theirs = logs
    assert [step["step"] for step in ours] == [step["step"] for step in theirs] == [1, 2]
    for own, their in zip(ours, theirs):
        assert set(their) <= set(own) and all(isinstance(own[name], type(their[name])) for name in their)
        assert own["learning_rate"] == pytest.approx(their["learning_rate"])
        # The reward is minus the number of characters, of which a completion has at most 12 tokens.
        assert -200 < own["reward"] < 0 and -200 < their["reward"] < 0


def open_box(box: int) -> str:
    """Opens a box.

    Args:
        box: Number of the box, from 1.
    """
    return f"box {box} holds a key"


def test_a_tool_beside_trl_is_called_and_answered_alike(demo, tmp_path):
    """A model that has learned a call makes it in both. Prompts, calls and answers have the same text and as many tokens."""
    trl, transformers = needs("trl"), needs("transformers")
    call = '<tool_call>\n{"name": "open_box", "arguments": {"box": 2}}\n</tool_call>'
    rows = [{"prompt": [{"role": "user", "content": f"Which box {i}?"}]} for i in range(4)]
    settings = {"dtype": "float32", "save_strategy": "no", "gradient_accumulation_steps": 1, "disable_tqdm": True, "allow_text_only": True}
    shutil.copytree(demo / "model", tmp_path / "model")
    # TRL refuses templates that do not describe tools.
    shutil.copy(Path(trl.__file__).parent / "chat_templates/qwen3_vl.jinja", tmp_path / "model/chat_template.jinja")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "model")
    prompt = processor.apply_chat_template(rows[0]["prompt"], tools=[open_box], add_generation_prompt=True, tokenize=False)
    system = {"role": "system", "content": re.search(r"<\|im_start\|>system\n(.*?)<\|im_end\|>", prompt, re.S)[1]}
    args = omnigrpo.SFTConfig(
        tmp_path / "caller", max_steps=150, per_device_train_batch_size=2, learning_rate=2e-3, max_completion_length=80, **settings
    )
    omnigrpo.SFTTrainer(tmp_path / "model", args, [{"prompt": [system, *row["prompt"]], "solution": call} for row in rows]).train()

    kept = {}

    def reward(name):
        def keep(prompts, completions, completion_ids, **kwargs):
            kept[name] = list(zip(prompts, completions, completion_ids))
            return [float(i % 2) for i in range(len(completions))]

        return keep

    path, room = str(tmp_path / "caller"), {"max_completion_length": 240, "num_generations": 4, "max_steps": 1}
    args = omnigrpo.GRPOConfig(tmp_path / "own", per_device_train_batch_size=1, max_turns=1, **room, **settings)
    trainer = omnigrpo.GRPOTrainer(path, reward("own"), args, rows, tools=[open_box])
    trainer.train()
    more = {"per_device_train_batch_size": 4, "max_tool_calling_iterations": 1, "model_init_kwargs": {"dtype": "float32"}}
    args = trl_config(trl, tmp_path / "trl", **more, **room)
    peer = trl.GRPOTrainer(path, reward("trl"), args, needs("datasets").Dataset.from_list(rows), processing_class=processor, tools=[open_box])
    peer.train()

    ours, theirs = trainer.state.log_history[0], peer.state.log_history[0]
    assert {name for name in theirs if name.startswith("tools/")} == {name for name in ours if name.startswith("tools/")}
    roles = ["assistant", "tool", "assistant"]
    their = next((completion, ids) for _, completion, ids in kept["trl"] if [turn["role"] for turn in completion] == roles)
    own = next(completion for _, completion, _ in kept["own"] if len(completion) == 3 and completion[0]["content"] == call)
    assert [turn["role"] for turn in own] == roles and own[1]["content"] == their[0][1]["content"] == "box 2 holds a key"
    lines = map(json.loads, (tmp_path / "own/rollouts/step-000001.jsonl").read_text().splitlines())
    turn = next(row["turns"][0] for row in lines if row.get("turns") and row["turns"][0]["model"] == call)
    # The tokens of TRL up to the start of the model's second turn.
    text = processor.tokenizer.decode(their[1])
    before = text[: text.index("<|im_start|>assistant\n") + len("<|im_start|>assistant\n")]
    first, answer = before.split("<|im_end|>", 1)
    count = lambda text: len(processor.tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    assert (first, count(first + "<|im_end|>"), count(answer)) == (call, turn["model_tokens"], turn["tokens"])
    assert processor.tokenizer(before, add_special_tokens=False)["input_ids"] == list(their[1])[: count(before)]


def test_log_probabilities_are_those_of_transformers(demo):
    torch, transformers = needs("torch"), needs("transformers")
    path, (row,) = str(demo / "model"), pictured(demo, 1)
    processor = transformers.AutoProcessor.from_pretrained(path)
    peer = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype="float32")
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["prompt"][0]["content"]}]}]
    own = omnigrpo.Model.load(path, dtype="float32")
    answer = own.generate([{**row, "prompt": turn}], temperature=0, max_completion_length=12)[0][0]
    text = processor.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[text], images=[row["image"]], return_tensors="pt")
    ids = torch.tensor([answer["completion_ids"]])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], ids], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, ids.shape[1]))
    with torch.no_grad():
        logits = peer(**inputs).logits[0, -ids.shape[1] - 1 : -1]
    theirs = logits.log_softmax(-1).gather(-1, ids[0][:, None])[:, 0].tolist()
    assert answer["logprobs"] == pytest.approx(theirs, abs=1e-4) and len(theirs) > 2
    scored = own.score({**row, "prompt": turn}, [answer["text"]])[0]
    assert scored[: len(theirs) - 1] == pytest.approx(theirs[:-1], abs=1e-4)


def test_text_prompts_are_those_of_trl(demo, tmp_path):
    """The quickstart of TRL: prompts that are texts, and a reward that counts characters."""
    trl, transformers, datasets = needs("trl"), needs("transformers"), needs("datasets")
    processor = transformers.AutoProcessor.from_pretrained(demo / "model")
    templated = processor.apply_chat_template([{"role": "user", "content": "Which?"}], add_generation_prompt=True, tokenize=False)
    rows, seen = [{"prompt": text} for text in ("Which colour is grass?", "Say a number.", templated, "How many?")], {}

    def reward(name):
        def keep(prompts, completions, **kwargs):
            seen[name] = set(prompts), {type(completion) for completion in completions}
            return [-float(abs(20 - len(completion))) for completion in completions]

        return keep

    args = trl_config(trl, tmp_path / "trl", max_steps=1)
    trl.GRPOTrainer(str(demo / "model"), reward("trl"), args, datasets.Dataset.from_list(rows), processing_class=processor).train()
    args.output_dir, args.allow_text_only = str(tmp_path / "own"), True
    omnigrpo.GRPOTrainer(demo / "model", reward("own"), args, datasets.Dataset.from_list(rows)).train()
    assert seen["own"] == seen["trl"] == ({row["prompt"] for row in rows}, {str})
    # The tokens of the prompts are those of the tokenizer of transformers.
    own = omnigrpo.Model.load(demo / "model", dtype="float32")
    peer = transformers.AutoModelForImageTextToText.from_pretrained(demo / "model", dtype="float32")
    torch = needs("torch")
    for row in rows:
        answer = own.generate([row], temperature=0, max_completion_length=6, continue_text_prompts=True)[0][0]
        inputs = processor.tokenizer(row["prompt"], return_tensors="pt")
        ids = torch.tensor([answer["completion_ids"]])
        with torch.no_grad():
            logits = peer(input_ids=torch.cat([inputs["input_ids"], ids], dim=1)).logits[0, -ids.shape[1] - 1 : -1]
        theirs = logits.log_softmax(-1).gather(-1, ids[0][:, None])[:, 0].tolist()
        assert answer["logprobs"] == pytest.approx(theirs, abs=1e-4)


def test_a_changed_processor_is_refused_by_what_differs(demo, tmp_path):
    transformers = needs("transformers")
    rows, model = demo / "data/train.jsonl", str(demo / "model")
    make = lambda processor: omnigrpo.GRPOTrainer(model, "accuracy", None, rows, processing_class=processor)  # noqa: E731
    fresh = lambda: transformers.AutoProcessor.from_pretrained(model)  # noqa: E731
    processor = fresh()
    # Padding has no effect.
    processor.tokenizer.pad_token, processor.tokenizer.padding_side = processor.tokenizer.eos_token, "left"
    make(processor)
    make(processor.tokenizer)
    processor.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match="processing_class differs .* in chat_template, expected"):
        make(processor)
    processor = fresh()
    processor.image_processor.max_pixels = 12345
    with pytest.raises(ValueError, match="image_processor.max_pixels"):
        make(processor)
    processor = fresh()
    processor.tokenizer.add_special_tokens({"additional_special_tokens": ["<more>"]})
    with pytest.raises(ValueError, match="tokenizer.added tokens"):
        make(processor)


def test_a_saved_adapter_finds_its_base(demo, tmp_path):
    peft = needs("peft")
    args = omnigrpo.SFTConfig(
        tmp_path / "adapter", use_peft=True, lora_rank=2, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=1, dtype="float32",
        allow_text_only=True,
    )
    omnigrpo.SFTTrainer(demo / "model", args, [{"prompt": [{"role": "user", "content": "?"}], "solution": "1"}] * 2).train()
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert Path(config["base_model_name_or_path"]) == (demo / "model").resolve()
    assert peft.AutoPeftModel.from_pretrained(tmp_path / "adapter").peft_config["default"].r == 2


def test_attributes_that_trl_lacks_act_or_are_errors(tmp_path):
    trl = needs("trl")
    args = trl_config(trl, tmp_path, max_steps=1)
    args.allow_text_only, args.strict_media = True, True
    assert omnigrpo.GRPOConfig.of(args).settings["strict_media"]
    args.alow_text_only = True
    with pytest.raises(TypeError, match="alow_text_only"):
        omnigrpo.GRPOConfig.of(args)
