"""Training of the demo in this process."""

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import omnigrpo
from omnigrpo import _calls


def brief(completions, solution, **kwargs):
    assert threading.current_thread() is threading.main_thread()
    kwargs["log_metric"]("asked", len(completions))
    return [-float(len(completion[0]["content"])) for completion in completions]


def test_a_function_trains_beside_a_reward_by_name(start, tmp_path):
    trainer = start(["accuracy", brief], settings={"reward_weights": [1.0, 0.01]})
    done = trainer.train()
    assert done.global_step == 3 and not done.metrics["interrupted"]
    steps = trainer.state.log_history
    assert [row["step"] for row in steps] == [1, 2, 3] and trainer.state.global_step == 3
    assert steps[0]["rewards/brief/asked"] == 16
    kept = [json.loads(line) for line in (tmp_path / "run/rollouts/step-000001.jsonl").read_text().splitlines()]
    assert [row["rewards"]["brief"] for row in kept] == [-float(len(row["completion"])) for row in kept] and len(kept) == 16
    # The trained model answers, with log-probabilities that `score` confirms.
    row = {"prompt": "Which colour is it?"}
    answer = trainer.model.generate([row], temperature=0, max_completion_length=8)[0][0]
    scores = trainer.model.score(row, [answer["text"]])[0]
    assert scores[: len(answer["logprobs"]) - 1] == pytest.approx(answer["logprobs"][:-1], abs=1e-4)


def test_the_seed_and_not_the_place_of_the_reward_sets_the_run(start, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def brief(completions, **kwargs):\n    return [-float(len(c[0]['content'])) for c in completions]\n"
    )
    start([f"{tmp_path}/mine.py:brief"], folder=tmp_path / "file", settings={"reward_python": sys.executable}).train()
    start([lambda completions, **kwargs: [-float(len(c[0]["content"])) for c in completions]], folder=tmp_path / "here").train()
    of = lambda name: [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]  # noqa: E731
    same = ("loss", "reward", "reward_std", "grad_norm", "completions/mean_length")
    steps = [[{name: row[name] for name in same} for row in of(place) if "loss" in row] for place in ("file", "here")]
    assert steps[0] == steps[1] and len(steps[0]) == 3


def test_a_reward_gets_the_whole_conversation_and_the_columns(start):
    seen = []

    def keep(prompts, completions, kind, trainer_state, **kwargs):
        seen.append((prompts[0], kind, trainer_state.global_step))
        return [float(i % 2) for i in range(len(completions))]

    turns = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "And?"},
    ]
    rows = ({"prompt": turns, "kind": f"k{i}"} for i in range(4))
    start(keep, rows, settings={"max_steps": 1, "allow_text_only": True}).train()
    # The first call is the trial before the run.
    assert seen[0][1] == ["k0"] * 4 and len(seen) == 2
    prompts, kinds, step = seen[1]
    assert prompts == turns and sorted(set(kinds)) == ["k0", "k1", "k2", "k3"] and len(kinds) == 16


def test_async_rewards_run_also_under_a_running_loop(start):
    async def slow(completions, **kwargs):
        await asyncio.sleep(0.01)
        return [float(i % 2) for i in range(len(completions))]

    async def notebook():
        return start(slow, settings={"max_steps": 1}).train()

    assert asyncio.run(notebook()).global_step == 1


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt("mine")], ids=["mistake", "interrupt"])
def test_an_exception_of_a_reward_arrives_unchanged_and_the_run_resumes(start, tmp_path, error):
    asked = []

    def broken(completions, **kwargs):
        asked.append(len(completions))
        if len(asked) == 3:
            raise error
        return brief(completions, **kwargs)

    start(brief, folder=tmp_path / "whole").train()
    with pytest.raises(type(error), match="^mine$") as caught:
        start(broken, folder=tmp_path / "cut").train()
    assert caught.value is error and traceback.extract_tb(error.__traceback__)[-1].name == "broken"
    # The first call is the trial before the run, so step 2 has failed.
    assert asked == [4, 16, 16] and [path.name for path in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-1"]
    kept = (tmp_path / "cut/rollouts/unscored-step-000002.jsonl").read_text().splitlines()
    assert sum(len(json.loads(row)["completions"]) for row in kept) == 16
    assert start(broken, folder=tmp_path / "cut").train().global_step == 3
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


def test_an_exception_of_a_callback_arrives_unchanged(start, tmp_path):
    class Broken:
        def on_log(self, args, state, control, logs, **kwargs):
            raise LookupError(f"step {state.global_step}")

    with pytest.raises(LookupError, match="^'?step 1'?$"):
        start(brief, callbacks=[Broken]).train()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_wrong_answer_of_a_reward_is_an_error_with_its_name(start):
    with pytest.raises(omnigrpo.OmnigrpoError, match=r"short.*2 values for 4 completions"):
        start(short).train()


def short(completions, **kwargs):
    return [1.0, 2.0]


def a_dict(completions, **kwargs):
    return {"short": 1.0}


def not_a_number(completions, **kwargs):
    return [float("nan")] * len(completions)


def no_metric(completions, log_metric, **kwargs):
    log_metric("mine", float("inf"))
    return [1.0] * len(completions)


def no_column(completions, log_extra, **kwargs):
    log_extra("mine", [float("-inf")] * len(completions))
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    "reward, error, message",
    [
        (a_dict, TypeError, "the reward `a_dict` returned a dict, expected a list with a finite number, or None, per completion"),
        (not_a_number, ValueError, r"the reward `not_a_number` of row \d+, completion 0 is nan, expected a finite number"),
        (no_metric, ValueError, "the metric `mine` is inf, expected a finite number"),
        (no_column, ValueError, r"`columns.mine\[0\]` is -inf, expected a finite number"),
    ],
)
def test_what_is_no_reward_is_named(start, reward, error, message):
    with pytest.raises(error, match=message):
        start(reward).train()


@pytest.mark.parametrize("moment", ["rollout", "reward", "backward", "step", "save"])
def test_ctrl_c_saves_and_the_same_call_resumes_to_the_same_bytes(start, tmp_path, monkeypatch, moment):
    sent = []

    def interrupt():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    class Interrupt:
        def on_step_end(self, args, state, control, **kwargs):
            if moment == "step" and not sent:
                interrupt()

        def on_save(self, args, state, control, **kwargs):
            if moment == "save" and not sent:
                interrupt()

    def reward(completions, **kwargs):
        if moment == "reward" and len(completions) > 48 and not sent:
            interrupt()
            time.sleep(5)
        return brief(completions, **kwargs)

    def doing(self, _, state):
        if state["phase"].startswith(moment) and not sent:
            interrupt()

    # Steps that last longer than the pause between two looks, so that phases are seen.
    long = {"min_completion_length": 24, "max_completion_length": 128, "num_generations": 16, "save_steps": 1}
    start(brief, folder=tmp_path / "whole", settings=long).train()
    monkeypatch.setattr(_calls.Calls, "on_doing", doing)
    with pytest.raises(KeyboardInterrupt):
        start(reward, folder=tmp_path / "cut", callbacks=[Interrupt], settings=long).train()
    assert sent and list((tmp_path / "cut").glob("checkpoint-*"))
    resumed = start(brief, folder=tmp_path / "cut", settings=long)
    assert resumed.train().global_step == 3
    assert weights(tmp_path / "whole") == weights(tmp_path / "cut")


def test_a_second_ctrl_c_raises_at_once(start, monkeypatch):
    sent = []

    def interrupt():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    def doing(self, _, state):
        if not sent:
            threading.Timer(0.1, interrupt).start()
            interrupt()

    monkeypatch.setattr(_calls.Calls, "on_doing", doing)
    with pytest.raises(KeyboardInterrupt):
        start(brief, settings={"max_completion_length": 200, "num_generations": 128}).train()
    assert len(sent) == 2 and time.monotonic() - sent[1] < 0.5


# Sends a signal to itself in the second step, and another one later.
STOPPED = """
import os, signal, sys
import omnigrpo

folder, demo, steps, first, second, own = sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:]
settings = dict(per_device_train_batch_size=4, gradient_accumulation_steps=1, num_generations=4, max_completion_length=12,
                learning_rate=3e-4, dtype="float32", threads=1)

def send(name):
    if name != "none":
        os.kill(os.getpid(), getattr(signal, name))

class Send:
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            send(first)
            send(second)

def brief(completions, **kwargs):
    return [-float(len(completion[0]["content"])) for completion in completions]

if own == "sets":
    signal.signal(signal.SIGTERM, lambda number, frame: print("mine", flush=True))
elif own == "raises":
    def mine(number, frame):
        raise LookupError("mine")
    signal.signal(signal.SIGTERM, mine)
before = signal.getsignal(signal.SIGTERM)
trainer = omnigrpo.GRPOTrainer(f"{demo}/model", brief, omnigrpo.GRPOConfig(folder, max_steps=steps, **settings), f"{demo}/data/train.jsonl", callbacks=[Send])
try:
    trainer.train()
finally:
    print(f"step {trainer.state.global_step}, handlers {'kept' if signal.getsignal(signal.SIGTERM) == before else 'changed'}", flush=True)
"""


def stopped(folder, demo, steps, *words):
    """Run the script, and return its exit code and its output."""
    command = [sys.executable, "-c", STOPPED, folder, demo, steps, *words]
    said = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)
    return said.returncode, said.stdout.splitlines(), said.stderr


def test_sigterm_saves_and_the_same_script_resumes_to_the_same_bytes(demo, tmp_path):
    assert stopped(tmp_path / "whole", demo, 4, "none", "none", "none")[0] == 0
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1"):
        code, lines, said = stopped(tmp_path / name, demo, 4, name, "none", "none")
        assert (code, lines) == (75, ["step 2, handlers kept"]), said
        assert [path.name for path in (tmp_path / name).glob("checkpoint-*")] == ["checkpoint-2"]
        code, lines, said = stopped(tmp_path / name, demo, 4, "none", "none", "none")
        assert (code, lines) == (0, ["step 4, handlers kept"]), said
        assert weights(tmp_path / name) == weights(tmp_path / "whole")


def test_a_scheduler_may_warn_before_sigterm(demo, tmp_path):
    code, lines, said = stopped(tmp_path / "run", demo, 4, "SIGUSR1", "SIGTERM", "none")
    assert (code, lines) == (75, ["step 2, handlers kept"]), said
    assert (tmp_path / "run/checkpoint-2").is_dir()


def test_a_handler_of_the_script_stays(demo, tmp_path):
    code, lines, said = stopped(tmp_path / "sets", demo, 3, "SIGTERM", "none", "sets")
    assert (code, lines) == (0, ["mine", "step 3, handlers kept"]), said
    code, lines, said = stopped(tmp_path / "raises", demo, 3, "SIGTERM", "none", "raises")
    assert (code, lines) == (1, ["step 2, handlers kept"]) and "LookupError: mine" in said
    assert (tmp_path / "raises/checkpoint-2").is_dir()


def test_rewards_of_files_and_of_this_process_get_the_same_arguments(start, tmp_path):
    code = """
import json
def keep(**kwargs):
    plain = {name: value for name, value in sorted(kwargs.items()) if not callable(value) and name != "trainer_state"}
    line = json.dumps({**plain, "step": kwargs["trainer_state"].global_step, "logs": sorted(n for n in kwargs if n.startswith("log_"))})
    with open(FILE, "a") as out:
        out.write(line + "\\n")
    return [float(i % 3) for i in range(len(kwargs["completions"]))]
"""
    seen = []
    for name in ("file", "here"):
        own = code.replace("FILE", repr(str(tmp_path / f"{name}.jsonl")))
        (tmp_path / "mine.py").write_text(own)
        space = {}
        exec(own, space)
        reward, more = (space["keep"], {}) if name == "here" else (f"{tmp_path}/mine.py:keep", {"reward_python": sys.executable})
        turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]
        rows = [{"prompt": turns, "solution": "1", "kind": i} for i in range(4)]
        start(reward, rows, folder=tmp_path / name, settings={"max_steps": 2, "allow_text_only": True, **more}).train()
        seen.append((tmp_path / f"{name}.jsonl").read_bytes())
    assert seen[0] == seen[1] and len(seen[0].splitlines()) == 3


def test_two_trainings_at_a_time_are_each_as_alone(start, tmp_path):
    def reward(completions, **kwargs):
        return [-float(len(completion[0]["content"])) for completion in completions]

    def train(name):
        return start(reward, folder=tmp_path / name, settings={"seed": 7 + (name != "alone" and int(name))}).train().global_step

    train("alone")
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(train, "01")) == [3, 3]
    assert weights(tmp_path / "alone") == weights(tmp_path / "0") != weights(tmp_path / "1")


def test_a_callback_stops_the_run(start):
    class Stop:
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    done = start(brief, callbacks=[Stop()], settings={"max_steps": 50}).train()
    assert done.global_step == 1 and done.metrics["interrupted"]


def free_share(work):
    """Return the share of the time of `work` in which another thread of Python does not wait for the GIL."""

    def times():
        # The kernel counts the time that the thread ran, and the time that it waited for a processor.
        ran, queued, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
        return ran + queued, time.monotonic_ns()

    begun, over, found = threading.Event(), threading.Event(), []

    def count():
        first = times()
        begun.set()
        while not over.is_set():
            pass
        found.extend(last - before for last, before in zip(times(), first))

    thread, usual = threading.Thread(target=count), sys.getswitchinterval()
    # A thread that waits for the GIL wakes after each interval, and then waits for a processor.
    sys.setswitchinterval(0.1)
    thread.start()
    begun.wait()
    work()
    over.set()
    thread.join()
    sys.setswitchinterval(usual)
    return found[0] / found[1]


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="NOT TESTED: the GIL; the kernel counts no waits")
def test_other_threads_run_meanwhile(start):
    # A function of C that keeps the GIL, so that the measure would show a step that keeps it.
    assert free_share(lambda: ctypes.PyDLL(None).usleep(500_000)) < 0.5
    assert free_share(start(brief).train) > 0.8


def test_the_development_mode_of_python_has_no_complaint(demo, tmp_path):
    code = f"""
import omnigrpo
args = omnigrpo.GRPOConfig({str(tmp_path)!r}, num_generations=2, per_device_train_batch_size=2, max_completion_length=4, max_steps=1,
                           gradient_accumulation_steps=1, disable_tqdm=True)
score = lambda completions, **columns: [float(i) for i in range(len(completions))]
trainer = omnigrpo.GRPOTrainer({str(demo / "model")!r}, score, args, {str(demo / "data/train.jsonl")!r})
trainer.train()
trainer.model.generate(["Which colour?"], max_completion_length=2)
"""
    done = subprocess.run([sys.executable, "-X", "dev", "-W", "error", "-c", code], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if not line.startswith("warning: no ")]
    assert (done.returncode, said) == (0, []), done.stderr


def test_a_step_leaves_no_thread_and_the_log_has_every_number(start, tmp_path):
    before = threading.active_count(), len(os.listdir("/proc/self/task"))
    trainer = start(brief)
    trainer.train()
    # The pool of the numbers stays.
    first = len(os.listdir("/proc/self/task"))
    start(brief, folder=tmp_path / "again").train()
    assert threading.active_count() == before[0] and len(os.listdir("/proc/self/task")) <= first
    logged = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    logged = [{name: value for name, value in row.items() if value is not None} for row in logged if "loss" in row]
    missing = [set(row) - set(own) for row, own in zip(logged, trainer.state.log_history)]
    assert missing == [set()] * 3


def test_evaluations_arrive(start, demo):
    kept = []

    class Keep:
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            kept.append(metrics["eval_reward"])

    trainer = start("accuracy", eval_dataset=demo / "data/eval.jsonl", callbacks=[Keep()], settings={"max_steps": 1, "eval_on_start": True})
    done = trainer.train()
    assert len(kept) == 2 and kept[0] == done.metrics["before"]["eval_reward"]


TRACKIO = """
import json, os

class Run:
    def log(self, values, step):
        with open(os.environ["TOLD"], "a") as told:
            rows = values.get("completions")
            print(json.dumps([step, sorted(values) if rows is None else rows]), file=told)

    def finish(self):
        self.log({"finished": 1}, None)

def init(**given):
    with open(os.environ["TOLD"], "a") as told:
        print(json.dumps([given["name"], given["resume"]]), file=told)
    return Run()

def Image(path):
    assert os.path.exists(path)
    return "picture"

def Video(path, format):
    assert path.endswith(format)
    return "clip"

def Table(columns=None, data=None, dataframe=None):
    assert dataframe is not None or len(columns) == len(data[0])
    return len(data if dataframe is None else dataframe)
"""


# Trackio no longer installs pandas.
@pytest.mark.parametrize("pandas", ["def DataFrame(rows, columns):\n    return rows\n", "raise ImportError"], ids=["pandas", "alone"])
def test_trackio_gets_the_steps_and_continues_the_run_that_resumes(start, tmp_path, monkeypatch, pandas):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/trackio.py").write_text(TRACKIO)
    (tmp_path / "modules/pandas.py").write_text(pandas)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'modules'}:{os.environ.get('PYTHONPATH', '')}")

    def told(file, steps, folder="run"):
        monkeypatch.setenv("TOLD", str(tmp_path / file))
        tracked = {"report_to": "trackio", "logging_steps": 1, "max_steps": steps, "save_steps": 1, "log_completions": True}
        start(brief, folder=tmp_path / folder, settings=tracked).train()
        return [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]

    begun = told("first", 1)
    name, resume = begun[0]
    assert name.startswith("run-") and resume == "never" and begun[-1] == [None, ["finished"]], begun
    assert any(step == 1 and "reward" in values for step, values in begun[1:-1] if isinstance(values, list)), begun
    assert [1, 8] in begun, "a table of the logged completions"
    # Another run in a folder of this name is another run.
    assert told("third", 1, "other/run")[0][0] != name
    continued = told("second", 2)
    assert continued[0] == [name, "allow"] and {step for step, _ in continued[1:-1]} == {2}, continued


def test_sft_trains(demo, tmp_path):
    rows = [{"prompt": "Which colour is it?", "solution": "red"}, {"prompt": "Which one?", "solution": "blue"}]
    settings = {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "dtype": "float32"}
    args = omnigrpo.SFTConfig(tmp_path, **settings)
    with pytest.raises(omnigrpo.OmnigrpoError, match="all rows are text only"):
        omnigrpo.SFTTrainer(demo / "model", args, rows).train()
    args = omnigrpo.SFTConfig(tmp_path, allow_text_only=True, **settings)
    trainer = omnigrpo.SFTTrainer(demo / "model", args, rows)
    assert trainer.train().global_step == 2
    assert trainer.state.log_history[1]["loss"] < trainer.state.log_history[0]["loss"]


def test_a_plan_names_the_memory(start):
    numbers = omnigrpo.plan(start("accuracy"))
    assert numbers["total"] > 1_000_000, numbers


def test_evaluate_returns_metrics_and_rows(demo):
    def always(completions, **kwargs):
        return [0.25] * len(completions)

    found = omnigrpo.evaluate(demo / "model", demo / "data/eval.jsonl", ["accuracy", always], max_completion_length=12)
    assert found["metrics"]["eval_rewards/always/mean"] == 0.25
    assert len(found["rows"]) == 8 and found["skipped"] == 0
