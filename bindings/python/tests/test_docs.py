"""The blocks of code of docs/python.md, each run as a script in one folder, and examples/notebook.py."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import omnigrpo

PAGE = Path(__file__).parents[3] / "docs/python.md"
NOTEBOOK = PAGE.parents[1] / "examples/notebook.py"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if PAGE.exists() else []


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("docs")


def run(code, place):
    env = {**os.environ, "PYTHONPATH": str(Path(omnigrpo.__file__).resolve().parents[1])}
    done = subprocess.run([sys.executable, "-c", code], cwd=place, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not BLOCKS, reason="the tests run outside of the repository")
def test_every_block_of_the_page_runs(place):
    pytest.importorskip("PIL", reason="NOT TESTED: the page; `pip install pillow`")
    said = [run(code, place) for code in BLOCKS]
    logs = ast.literal_eval(said[1])
    assert [step["step"] for step in logs] == [1, 2] and all("rewards/brief/mean" in step for step in logs)


@pytest.mark.skipif(not NOTEBOOK.exists(), reason="the tests run outside of the repository")
@pytest.mark.parametrize("steps", [2, pytest.param(250, marks=pytest.mark.slow)])
def test_the_notebook_runs_and_teaches_the_model(tmp_path, steps):
    code, count = re.subn(r"max_steps=250\b", f"max_steps={steps}", NOTEBOOK.read_text())
    said = dict(line.split() for line in run(code, tmp_path).splitlines() if line.startswith(("before ", "after ")))
    assert count == 1 and 0 < float(said["before"]) < 0.7, said
    assert 0 < float(said["after"]) <= 1 and (steps == 2 or float(said["after"]) > 0.85), said
