"""Settings, rows, errors and processes."""

import json
import multiprocessing
import os
import pydoc
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import omnigrpo
from omnigrpo import _omnigrpo

PAGES = Path(__file__).parents[3] / "docs"


def resident():
    """Return the memory of this process, bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_names_are_those_of_the_table():
    with pytest.raises(TypeError, match="did you mean `learning_rate`") as caught:
        omnigrpo.GRPOConfig(learning_rat=1e-4, max_step=2)
    assert "max_step" in str(caught.value)
    with pytest.raises(ValueError, match="num_generations"):
        omnigrpo.GRPOConfig(num_generations="many")
    config = omnigrpo.GRPOConfig("here", num_generations=3)
    assert (config.num_generations, config.top_p, config.output_dir) == (3, 1.0, Path("here"))
    assert "likeliest tokens" in config.describe("top_p")
    with pytest.raises(AttributeError):
        config.nothing  # noqa: B018


def test_the_settings_are_those_of_the_pages_and_have_help():
    if not PAGES.exists():
        pytest.skip("the tests run outside of the repository")
    table = re.findall(r"^\| (`[^|]+`)", (PAGES / "generated/flags.md").read_text().split("## ", 1)[1], re.M)
    paged = {name for row in table for name in re.findall(r"`(\w+)`", row)}
    settings = json.loads(_omnigrpo.schema())["properties"]
    # Words of the command line alone.
    assert paged - set(settings) == {
        "config", "print_config", "dry_run", "run_dirs", "dataset_format", "gguf_file", "script", "shell", "directory", "checkpoint", "reward"
    } and set(settings) <= paged
    text = pydoc.render_doc(omnigrpo.GRPOConfig, renderer=pydoc.plaintext)
    assert all(f"{name}: {about['description']}".split("\n")[0][:60] in text for name, about in settings.items() if "$ref" not in about)
    assert "completions: a list of tokens" not in text and "nats" in pydoc.render_doc(omnigrpo.Model, renderer=pydoc.plaintext)


def test_a_setting_or_a_column_that_is_not_finite_is_named(demo, tmp_path):
    # Shares are numbers or texts.
    kinds = ('"type": "number"', '"type": "integer"')
    properties = json.loads(_omnigrpo.schema())["properties"]
    numbers = [name for name, about in properties.items() if any(kind in json.dumps(about) for kind in kinds)]
    assert len(numbers) > 80 and "val_split_ratio" in numbers and "max_steps" in numbers
    for name in numbers:
        for number in ("nan", "inf", "-inf"):
            with pytest.raises(ValueError, match=f"`{name}` is {number}, expected a finite number"):
                omnigrpo.GRPOConfig(**{name: float(number)})
    with pytest.raises(ValueError, match=r"`reward_weights\[1\]` is nan, expected a finite number"):
        omnigrpo.GRPOConfig(reward_weights=[1.0, float("nan")])
    rows = [{"prompt": "Hm?", "solution": "x"}, {"prompt": "Hm?", "solution": "x", "price": float("nan")}]
    with pytest.raises(ValueError, match="row 1 of train_dataset: `price` is nan, expected a finite number"):
        omnigrpo.GRPOTrainer(demo / "model", "accuracy", omnigrpo.GRPOConfig(tmp_path), rows).train()


def test_contradictions_are_errors_before_the_run(demo):
    args = omnigrpo.GRPOConfig(reward_weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="different lengths"):
        omnigrpo.GRPOTrainer(demo / "model", "accuracy", args, demo / "data/train.jsonl")


def test_a_missing_model_is_an_error_with_the_text_of_the_program():
    with pytest.raises(omnigrpo.OmnigrpoError, match="the model was not found") as caught:
        omnigrpo.Model.load("no/such/folder/at all")
    assert "expected: a checkpoint directory" in str(caught.value)


def test_pictures_have_the_same_result_in_every_form(demo):
    Image = pytest.importorskip("PIL.Image")
    numpy = pytest.importorskip("numpy")
    lines = map(json.loads, (demo / "data/eval.jsonl").read_text().splitlines())
    row = next(row for row in lines if "image" in row)
    file = demo / "data" / row["image"]
    picture = Image.open(file).convert("RGB")
    model = omnigrpo.Model.load(demo / "model")
    text = row["conversations"][0]["value"]
    forms = [file, str(file), picture, numpy.asarray(picture), file.read_bytes(), {"bytes": file.read_bytes(), "path": None}]
    rows = [{"prompt": text, "image": form} for form in forms]
    question = text.replace("<image>", "").strip()
    rows.append({"prompt": [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": question}]}]})
    answers = [row[0] for row in model.generate(rows[:6], temperature=0, max_completion_length=12)]
    assert len({tuple(answer["logprobs"]) for answer in answers}) == 1 and len(answers[0]["logprobs"]) > 1
    assert model.generate(rows[6:], temperature=0, max_completion_length=12)[0][0]["text"]
    other = model.generate([{"prompt": text, "image": numpy.zeros_like(numpy.asarray(picture))}], temperature=0, max_completion_length=12)
    assert other[0][0]["logprobs"] != answers[0]["logprobs"]


def test_a_sideways_picture_has_the_same_result_in_every_form(demo, tmp_path):
    Image = pytest.importorskip("PIL.Image")
    ImageOps = pytest.importorskip("PIL.ImageOps")
    lines = map(json.loads, (demo / "data/eval.jsonl").read_text().splitlines())
    row = next(row for row in lines if "image" in row)
    upright = Image.open(demo / "data" / row["image"]).convert("RGB").resize((84, 56))
    exif = Image.Exif()
    exif[0x0112] = 6
    file = tmp_path / "sideways.png"
    upright.transpose(Image.Transpose.ROTATE_90).save(file, exif=exif)
    assert ImageOps.exif_transpose(Image.open(file)).tobytes() == upright.tobytes()
    model, text = omnigrpo.Model.load(demo / "model"), row["conversations"][0]["value"]
    forms = [upright, file, file.read_bytes(), {"bytes": file.read_bytes(), "path": None}, Image.open(file), Image.open(file).convert("RGB")]

    def ask(**settings):
        rows = [{"prompt": text, "image": form} for form in forms]
        return [tuple(row[0]["logprobs"]) for row in model.generate(rows, temperature=0, max_completion_length=12, **settings)]

    assert len(set(ask())) == 1
    stored = ask(orientation="stored")
    assert len(set(stored)) == 2 and len(set(stored[1:])) == 1


def test_a_saved_model_answers_alike(demo, tmp_path):
    ask = lambda model: model.generate(["Which colour?"], temperature=0, max_completion_length=6)  # noqa: E731
    model = omnigrpo.Model.load(demo / "model")
    model.save(tmp_path / "copy")
    assert ask(omnigrpo.Model.load(tmp_path / "copy")) == ask(model)


def test_a_model_that_reads_text_only_trains_and_answers(tmp_path):
    model = PAGES.parent / "crates/models/tests/golden/checkpoints/qwen3"
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(4)]
    settings = {"max_steps": 1, "num_generations": 2, "max_completion_length": 4, "gradient_accumulation_steps": 1}
    args = omnigrpo.GRPOConfig(tmp_path / "run", **settings)
    omnigrpo.GRPOTrainer(model, ["accuracy"], args, rows).train()
    answers = omnigrpo.Model.load(tmp_path / "run").generate(["What is 2 + 3?"], temperature=0, max_completion_length=4)
    assert len(answers[0][0]["logprobs"]) == 4


def test_the_program_is_the_module(tmp_path):
    said = subprocess.run([sys.executable, "-m", "omnigrpo", "--version"], capture_output=True, text=True)
    assert said.returncode == 0 and omnigrpo.__version__ in said.stdout
    command = Path(sys.executable).with_name("omnigrpo")
    if command.exists():
        assert subprocess.run([command, "--version"], capture_output=True, text=True).stdout == said.stdout
    wrong = subprocess.run([sys.executable, "-m", "omnigrpo", "train", "--learning_rat", "1"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "did you mean `--learning_rate`" in wrong.stderr


def test_importing_is_light():
    code = "import sys, omnigrpo; print(sorted({'numpy', 'PIL', 'torch', 'datasets'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def large_copy(model, folder, layers):
    """Copy a checkpoint with its last layer repeated, so that it has some 0.8 MB of weights a layer."""
    config = json.loads((model / "config.json").read_text())
    content = (model / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    tensors = {name: about for name, about in json.loads(content[8:start]).items() if name != "__metadata__"}
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    more = {name.replace(last, f"model.layers.{layer}."): about for layer in range(config["num_hidden_layers"], layers)
            for name, about in tensors.items() if last in name}
    assert more
    data, header = [], {}
    for name, about in {**tensors, **more}.items():
        first, end = about["data_offsets"]
        place = sum(map(len, data))
        data.append(content[start + first : start + end])
        header[name] = {**about, "data_offsets": [place, place + end - first]}
    header = json.dumps(header).encode()
    shutil.copytree(model, folder)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"".join(data))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    return folder


def _forget(path):
    """Return the memory of this process before a model, with it, and after it was deleted and a run as well, bytes."""
    omnigrpo.Model.load(path.with_name("small")).generate(["?"], max_completion_length=2)
    sizes = [resident()]
    model = omnigrpo.Model.load(path, dtype="float32")
    model.generate(["?"], max_completion_length=2)
    sizes.append(resident())
    del model
    sizes.append(resident())
    args = omnigrpo.GRPOConfig(path.with_name("run"), max_steps=1, num_generations=2, per_device_train_batch_size=1,
                               gradient_accumulation_steps=1, max_completion_length=2, dtype="float32", save_strategy="no", allow_text_only=True)
    trainer = omnigrpo.GRPOTrainer(path, lambda completions, **_: [float(i) for i in range(len(completions))], args, ["What is it?"])
    trainer.train()
    sizes.append(resident())
    del trainer
    return [*sizes, resident()]


def test_a_deleted_model_returns_its_memory(demo, tmp_path):
    shutil.copytree(demo / "model", tmp_path / "small")
    path = large_copy(demo / "model", tmp_path / "large", 80)
    weights = (path / "model.safetensors").stat().st_size
    assert weights > 50_000_000
    # A process of its own has no memory of other tests.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        before, loaded, deleted, trained, after = pool.apply(_forget, (path,))
    assert loaded - before > 0.9 * weights
    assert deleted - before < 0.1 * weights, (before, loaded, deleted, trained, after)
    assert trained - before > 0.9 * weights
    assert after - before < 0.2 * weights, (before, loaded, deleted, trained, after)


def test_a_panic_is_an_error(capfd):
    if not hasattr(_omnigrpo, "fault"):
        pytest.skip("a release cannot plant a panic")
    for call, text in ((None, "planted"), (lambda *_: None, "planted 2")):
        with pytest.raises(omnigrpo.OmnigrpoError, match=f"^omnigrpo has a fault: {text}$"):
            _omnigrpo.fault(call)


def test_threads_get_the_same_answers(demo):
    model = omnigrpo.Model.load(demo / "model")
    ask = lambda seed: model.generate(["Which colour?"], seed=seed, num_generations=2, max_completion_length=8)  # noqa: E731
    alone = [ask(seed) for seed in range(4)]
    assert alone[0] != alone[1]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == alone


def _ask(path, queue):
    try:
        queue.put(omnigrpo.Model.load(path).generate(["?"], temperature=0, max_completion_length=2)[0][0]["text"])
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", ["spawn", "fork"])
def test_processes(demo, way):
    here = omnigrpo.Model.load(demo / "model").generate(["?"], temperature=0, max_completion_length=2)[0][0]["text"]
    context = multiprocessing.get_context(way)
    queue = context.Queue()
    process = context.Process(target=_ask, args=(demo / "model", queue))
    process.start()
    said = queue.get(timeout=60)
    process.join()
    if way == "spawn":
        assert said == here
    else:
        assert said.startswith("OmnigrpoError: this process is a fork") and "spawn" in said


def test_rows_that_are_no_json_are_errors(demo, tmp_path):
    args = omnigrpo.GRPOConfig(tmp_path)
    with pytest.raises(TypeError, match="object"):
        omnigrpo.GRPOTrainer(demo / "model", "accuracy", args, [{"prompt": "?", "extra": object()}]).train()
    assert os.listdir(tmp_path) == ["rows"]
