"""The package in a Jupyter kernel. Skipped where nbclient and ipykernel are not installed."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import omnigrpo

nbclient = pytest.importorskip("nbclient", reason="NOT TESTED: notebooks; `pip install nbclient ipykernel`")
pytest.importorskip("ipykernel", reason="NOT TESTED: notebooks; `pip install ipykernel`")
import nbformat  # noqa: E402  (nbclient has brought it)

START = """
import time
import omnigrpo

def slow(completions, **kwargs):
    time.sleep(0.3)
    return [-float(len(completion[0]["content"])) for completion in completions]

def trainer(folder, reward, **settings):
    args = omnigrpo.GRPOConfig(folder, per_device_train_batch_size=2, gradient_accumulation_steps=1, num_generations=4,
                               max_completion_length=8, dtype="float32", **settings)
    return omnigrpo.GRPOTrainer("demo/model", reward, args, "demo/data/train.jsonl")
"""


class Client(nbclient.NotebookClient):
    """A client that keeps every text of a display."""

    def process_message(self, msg, cell, cell_index):
        if msg["msg_type"] == "update_display_data":
            self.seen.append(msg["content"]["data"]["text/plain"])
        return super().process_message(msg, cell, cell_index)


class Notebook:
    """A kernel in a folder, and the cells that it has run."""

    def __init__(self, folder):
        self.folder, self.notebook = folder, nbformat.v4.new_notebook()
        self.client = Client(self.notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
        self.client.seen = []

    def run(self, code):
        """Run a cell and return its outputs."""
        cell = nbformat.v4.new_code_cell(code)
        self.notebook.cells.append(cell)
        self.client.execute_cell(cell, len(self.notebook.cells) - 1)
        return cell.outputs


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(omnigrpo.__file__).resolve().parents[1]), prepend=os.pathsep)
    omnigrpo.write_demo(tmp_path / "demo", train=32, eval=2)
    notebook = Notebook(tmp_path)
    with notebook.client.setup_kernel():
        notebook.run(START)
        yield notebook


def test_a_cell_shows_a_bar_a_chart_and_a_link_and_then_nothing(notebook):
    outputs = notebook.run("done = trainer('run', slow, max_steps=4).train()")
    data = [output["data"] for output in outputs if output["output_type"] == "display_data"]
    links = [one["text/html"] for one in data if "text/html" in one]
    assert len(links) == 1 and '<a href="http://127.0.0.1:' in links[0]
    bars = [one["text/plain"] for one in data if "text/html" not in one]
    assert len(bars) == 1 and "/4 [" in bars[0]
    said = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    assert "`omnigrpo watch run` shows the page again" in said
    assert len(data) + bool(said) == len(outputs), outputs
    # The bar has moved within a step, with the phase, and drew the rewards of the earlier steps.
    history = notebook.client.seen
    assert any("reward ·" in line for line in history), history
    assert any("· reward -" in line and "left" in line for line in history), history
    before = str(outputs)
    assert notebook.run("time.sleep(1)") == [] and str(outputs) == before
    assert notebook.run("done.global_step")[0]["data"]["text/plain"] == "4"


@pytest.mark.parametrize("where", ["reward", "numbers"])
def test_an_interrupt_saves_and_the_same_cell_resumes(notebook, where):
    notebook.run(
        f"""
def reward(completions, **kwargs):
    if asked[0] > 2:
        open("there", "w").close()
        time.sleep(60 if {where!r} == "reward" else 0)
    asked[0] += 1
    return [0.1 * len(completion[0]["content"]) for completion in completions]
asked = [0]
cut = trainer("cut", reward, max_steps=5 if {where!r} == "reward" else 1000, save_strategy="no", dashboard=False)
"""
    )

    def interrupt():
        until = time.monotonic() + 120
        while not (notebook.folder / "there").exists() and time.monotonic() < until:
            time.sleep(0.05)
        # `interrupt_kernel` sends the same signal, but it cannot be called on this thread.
        os.kill(pid, signal.SIGINT)

    (own,) = notebook.run("import os\nos.getpid()")
    pid = int(own["data"]["text/plain"])
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(nbclient.exceptions.CellExecutionError) as caught:
        notebook.run("cut.train()")
    thread.join()
    assert caught.value.ename == "KeyboardInterrupt"
    assert notebook.run("time.sleep(0.5)") == []
    (saved,) = (notebook.folder / "cut").glob("checkpoint-*")
    step = int(saved.name.split("-")[1])
    # In a reward, the step under way is undone.
    assert step == 2 if where == "reward" else step > 2
    outputs = notebook.run(f"asked = [-1000]\nprint(trainer('cut', reward, max_steps={step} + 1, dashboard=False).train().global_step)")
    assert [output["text"].strip() for output in outputs if output.get("name") == "stdout"] == [str(step + 1)]
