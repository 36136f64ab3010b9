"""Settings, rows, errors and processes."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

import omnigrpo


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


def test_a_saved_model_answers_alike(demo, tmp_path):
    ask = lambda model: model.generate(["Which colour?"], temperature=0, max_completion_length=6)  # noqa: E731
    model = omnigrpo.Model.load(demo / "model")
    model.save(tmp_path / "copy")
    assert ask(omnigrpo.Model.load(tmp_path / "copy")) == ask(model)


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


def test_the_tutorial_of_the_docs_runs(tmp_path):
    page = Path(__file__).parents[3] / "docs/python.md"
    if not page.exists():
        pytest.skip("the tests run outside of the repository")
    code = page.read_text().split("## From TRL in ten lines")[1].split("```python\n")[1].split("```")[0]
    env = {**os.environ, "PYTHONPATH": str(Path(omnigrpo.__file__).resolve().parents[1])}
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "TrainOutput(global_step=2" in said.stdout and len(said.stdout.splitlines()) >= 2
