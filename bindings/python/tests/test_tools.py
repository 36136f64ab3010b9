"""Tools and environments: functions and classes of Python that the model calls in the middle of a completion."""

import enum
import inspect
import json
import re
import sys
import threading
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest

import omnigrpo
from omnigrpo._reward import Environments, tool_schema

CALL = '<tool_call>{"name": "open_box", "arguments": {"box": 2}}</tool_call>'
PAGE = Path(__file__).parents[3] / "docs/turns.md"
ROWS = [{"prompt": f"Which box {i}?", "kind": ["key", "pen"][i % 2]} for i in range(4)]
# A completion holds a call, an answer, and the model's turn after it.
ROOM = {"max_completion_length": 160, "max_turns": 1, "num_generations": 2, "per_device_train_batch_size": 2, "max_steps": 1}


def never(completions, **kwargs):
    return [float(i % 2) for i in range(len(completions))]


def open_box(box: int) -> str:
    """Opens a box.

    Args:
        box: Number of the box, from 1.
    """
    return f"box {box} holds a key"


@pytest.fixture(scope="module")
def caller(demo, tmp_path_factory):
    """Return a model that has learned to call `open_box` where the prompt describes it."""
    folder = tmp_path_factory.mktemp("caller")
    settings = {"dtype": "float32", "save_strategy": "no", "gradient_accumulation_steps": 1}
    args = omnigrpo.GRPOConfig(folder / "first", **{**ROOM, **settings})
    omnigrpo.GRPOTrainer(demo / "model", never, args, ROWS, tools=[open_box]).train()
    prompt = json.loads((folder / "first/rollouts/step-000001.jsonl").read_text().splitlines()[0])["prompt"]
    system = {"role": "system", "content": re.search(r"<\|im_start\|>system\n(.*?)<\|im_end\|>", prompt, re.S)[1]}
    questions = [row["prompt"] + more for row in ROWS for more in ("", " It is key.", " It is pen.", " There are three boxes.")]
    rows = [{"prompt": [system, {"role": "user", "content": question}], "solution": CALL} for question in questions]
    args = omnigrpo.SFTConfig(
        folder / "last", max_steps=200, per_device_train_batch_size=4, learning_rate=2e-3, max_completion_length=128, allow_text_only=True, **settings
    )
    omnigrpo.SFTTrainer(demo / "model", args, rows).train()
    return folder / "last"


class Shelf:
    """Counts what happens to it."""

    made, opened = 0, ()

    def __init__(self):
        type(self).made += 1

    def reset(self, kind, **columns):
        self.opened, self.kind = [], kind
        return f" It is {kind}."

    def open_box(self, box: int) -> str:
        """Opens a box.

        Args:
            box: Number of the box, from 1.
        """
        self.opened.append(box)
        return f"box {box} holds a {self.kind}"

    def get_reward(self):
        return float(len(self.opened)) / 2


@pytest.fixture
def run(caller, tmp_path):
    """Return a function that trains the caller with tools, and returns the trainer and the recorded completions."""

    def train(rewards=None, rows=ROWS, settings=None, folder=tmp_path / "run", **tools):
        args = omnigrpo.GRPOConfig(folder, **{**ROOM, "gradient_accumulation_steps": 1, "dtype": "float32", **(settings or {})})
        trainer = omnigrpo.GRPOTrainer(caller, rewards, args, rows, **tools)
        trainer.train()
        lines = (folder / "rollouts/step-000001.jsonl").read_text().splitlines()
        return trainer, [json.loads(line) for line in lines]

    return train


def called(completions):
    return [completion for completion in completions if completion.get("turns")]


def test_a_function_is_a_tool_on_the_thread_of_the_caller(run):
    threads, seen = [], []

    def reward(prompts, completions, **kwargs):
        seen.extend(zip(prompts, completions))
        return never(completions)

    def open_box(box: int) -> str:
        """Opens a box.

        Args:
            box: Number of the box, from 1.
        """
        threads.append(threading.current_thread())
        return f"box {box} holds a key"

    trainer, completions = run(reward, tools=[open_box])
    logs = trainer.state.log_history[0]
    assert set(threads) == {threading.main_thread()} and len(threads) == len(called(completions)) > 0
    assert logs["tools/call_frequency"] == len(threads) / 4 and logs["tools/failure_frequency"] == 0
    assert logs["turns/max"] == 2 and logs["turns/environment_tokens"] > 0
    answers = [turn["text"] for completion in called(completions) for turn in completion["turns"]]
    assert set(answers) == {"box 2 holds a key"}, completions
    # Rewards get the completion as TRL gives it: all its turns.
    roles = {tuple(turn["role"] for turn in completion) for prompt, completion in seen[1:]}
    assert ("assistant", "tool", "assistant") in roles and roles <= {("assistant",), ("assistant", "tool", "assistant")}
    completion = next(completion for _, completion in seen[1:] if len(completion) == 3)
    assert [turn["content"] for turn in completion[:2]] == [CALL, "box 2 holds a key"]
    assert all([turn["role"] for turn in prompt][-1] == "user" for prompt, _ in seen)


@pytest.mark.parametrize("kind", ["function", "async"])
def test_the_model_reads_an_exception_of_a_tool(run, kind):
    def open_box(box: int) -> str:
        """Opens a box.

        Args:
            box: Number of the box, from 1.
        """
        raise LookupError("it is stuck")

    async def later(box: int) -> str:
        raise LookupError("it is stuck")

    later.__name__, later.__doc__ = open_box.__name__, open_box.__doc__
    trainer, completions = run(never, tools=[open_box if kind == "function" else later])
    answers = {turn["text"] for completion in called(completions) for turn in completion["turns"]}
    assert answers == {"{'error': 'it is stuck'}"}
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 1


def test_an_environment_has_a_state_for_each_completion(run):
    seen = []

    def reward(environments, completions, prompts, **kwargs):
        seen.append(([(e.kind, list(e.opened)) for e in environments], [prompt[-1]["content"] for prompt in prompts]))
        assert len({id(environment) for environment in environments}) == len(environments)
        return never(completions)

    before = Shelf.made
    trainer, completions = run(reward, environment_factory=Shelf, settings={"reward_weights": [0.5], "max_steps": 2})
    # The first call is the trial before the run.
    (states, questions) = seen[1]
    assert len(states) == 4 and {tuple(opened) for _, opened in states} <= {(), (2,)} and (2,) in {tuple(o) for _, o in states}
    assert all(question.endswith(f" It is {kind}.") for question, (kind, _) in zip(questions, states))
    for completion in called(completions):
        assert completion["turns"][0]["text"] == f"box 2 holds a {re.search('It is (key|pen)', completion['prompt'])[1]}"
    # The reward of the environment counts with weight 1.
    assert [row["rewards"]["Shelf"] for row in completions] == [0.5 if row in called(completions) else 0.0 for row in completions]
    assert [row["reward"] for row in completions] == pytest.approx([0.5 * row["rewards"]["reward"] + row["rewards"]["Shelf"] for row in completions])
    # Environments are used again.
    assert Shelf.made - before <= 5


def test_the_class_of_the_page_works(run):
    if not PAGE.exists():
        pytest.skip("the tests run outside of the repository")
    space = {}
    exec(re.search(r"```python\n(class .*?)```", PAGE.read_text(), re.S)[1], space)
    shelf = space["Shelf"]
    # The model knows a tool of this name.
    shelf.open_box, shelf.take.__name__, shelf.take.__doc__ = shelf.take, "open_box", open_box.__doc__
    del shelf.take
    trainer, completions = run(environment_factory=shelf)
    assert called(completions) and all(row["turns"][0]["text"] == "box 2 holds a key" for row in called(completions))
    assert [row["rewards"]["Shelf"] for row in completions] == [float(row in called(completions)) for row in completions]


@pytest.mark.parametrize("place", ["factory", "reset", "opening", "interrupt"])
def test_an_exception_of_an_environment_arrives_unchanged(run, tmp_path, place):
    error = KeyboardInterrupt("mine") if place == "interrupt" else ZeroDivisionError("mine")

    class Broken(Shelf):
        asked = 0

        def __init__(self):
            if place == "factory":
                raise error

        def reset(self, **columns):
            type(self).asked += 1
            if place == "opening" or place == "reset" and type(self).asked > 2:
                raise error

        def open_box(self, box: int) -> str:
            """Opens a box.

            Args:
                box: Number of the box, from 1.
            """
            raise error

    with pytest.raises(type(error), match="^mine$") as caught:
        run(never, environment_factory=Broken)
    assert caught.value is error


def test_answers_that_differ_within_a_row_are_an_error(run):
    class Random(Shelf):
        asked = 0

        def reset(self, **columns):
            type(self).asked += 1
            # The trial of the reward and the prompts of two rows come first.
            return " It is key." if type(self).asked <= 3 else " It is pen."

    with pytest.raises(ValueError, match="`reset` of Random returned ' It is .*expected what it returned before for row"):
        run(never, environment_factory=Random)


def test_a_row_chooses_its_environment():
    class Door(Shelf):
        def reset(self, **columns):
            assert "environment" not in columns
            super().reset("door")

    environments = Environments([], {"shelf": Shelf, "door": Door})
    row = {"row": 0, "columns": {"environment": "shelf", "kind": "key"}}
    assert len(environments.answer({"probe": True})["tools"]) == 1
    assert environments.answer({**row, "open": True})["answer"] == [{"type": "text", "text": " It is key."}]
    turn = {"turn": 1, "rollout": 0, "calls": [{"name": "open_box", "arguments": {"box": 1}}], "turns": [{"content": "? It is key."}]}
    answers = []
    for sample, name in enumerate(["shelf", "door"]):
        row["columns"]["environment"] = name
        answers.append(environments.answer({**row, **turn, "sample": sample})["answer"])
    assert answers == [[{"type": "text", "text": f"box 1 holds a {what}"}] for what in ("key", "door")]
    rows = [{**row, "sample": sample} for sample in (0, 1)]
    assert [type(environment) for environment in environments.scoring("mine", rows)] == [Shelf, Door]
    assert environments.rewards["Shelf"](environments=environments.scoring("Shelf", rows)) == [0.5, None]
    row["columns"]["environment"] = "window"
    with pytest.raises(ValueError, match="row 0 has the environment 'window', expected one of .'shelf', 'door'."):
        environments.answer({**row, "open": True})


def test_a_run_needs_no_rows_if_the_environment_asks(run):
    class Asks(Shelf):
        def reset(self, **columns):
            super().reset("key")
            return "Which box 1? It is key."

    trainer, completions = run(never, rows=None, environment_factory=Asks)
    assert len(completions) == 4 and called(completions)
    with pytest.raises(ValueError, match="max_steps"):
        run(never, rows=None, environment_factory=Asks, settings={"max_steps": None})


def test_a_file_on_the_command_line_gives_the_same_bits(run, caller, tmp_path):
    (tmp_path / "mine.py").write_text(inspect.getsource(open_box))
    here, _ = run(never, tools=[open_box])
    settings = {"environment": f"{tmp_path}/mine.py:open_box", "reward_python": sys.executable}
    there, _ = run(never, settings=settings, folder=tmp_path / "file")
    same = ("loss", "grad_norm", "completions/mean_length", "tools/call_frequency", "turns/environment_tokens")
    assert [here.state.log_history[0][name] for name in same] == [there.state.log_history[0][name] for name in same]


def test_evaluate_takes_tools(caller):
    asked = []

    class Box(Shelf):
        def reset(self, **columns):
            super().reset("key")

        def open_box(self, box: int) -> str:
            """Opens a box.

            Args:
                box: Number of the box, from 1.
            """
            asked.append(box)
            return super().open_box(box)

    found = omnigrpo.evaluate(caller, ROWS, None, environment_factory=Box, max_completion_length=160, max_turns=1, dtype="float32")
    assert asked == [2] * 4 and found["metrics"]["eval_rewards/Box/mean"] == 0.5


def test_what_is_no_tool_is_named(caller, run):
    def bare(box):
        return box

    with pytest.raises(TypeError, match="the tool `bare` has no docstring"):
        run(never, tools=[bare])
    with pytest.raises(ValueError, match="has no method `reset`"):
        run(never, environment_factory=object)
    with pytest.raises(ValueError, match="environment 'zoom' beside `tools`"):
        run(never, tools=[open_box], settings={"environment": "zoom"})


def test_descriptions_are_those_of_transformers():
    utils = pytest.importorskip("transformers.utils", reason="NOT TESTED: descriptions of tools; `pip install transformers`")
    class Colour(enum.Enum):
        RED = "red"
        BLUE = "blue"

    def plain(x: float, y: float = 2.0) -> float:
        """
        Multiplies two numbers.

        It can do no more.

        Args:
            x: The first number,
                with a second line: and a colon
            y: The second number (choices: [1, 2.5])

        Returns:
            The product
            of both.

        Raises:
            ValueError: Never.
        """

    def many(
        a: Optional[int], b: list[str], c: dict[str, int], d: tuple[int, str], e: Union[int, str, None], f: Literal["a", 3], g: Colour,
        h: list, i: dict, j: Any, k: Union[list[Optional[int]], str], m: bool = True,
    ) -> object:
        """Does many things."""

    many.__doc__ += "\n\n    Args:\n" + "".join(f"        {name}: About {name}.\n" for name in "abcdefghijkm")

    def nothing():
        """Does nothing."""

    for function in (plain, many, nothing, open_box, Shelf().open_box):
        # The order of the names is part of the prompt.
        assert json.dumps(tool_schema(function)) == json.dumps(utils.get_json_schema(function))
