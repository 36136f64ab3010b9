"""What a user of TRL changes takes effect, or is refused by name: rewards, settings, methods, callbacks, prompts."""

import array
import collections
import datetime
import decimal
import enum
import fractions
import functools
import json
import operator
import pathlib
import random
import re
import types
import uuid

import numpy
import pytest

import omnigrpo
from omnigrpo._identity import digest


def varied(completions, **kwargs):
    return [float(i % 3) for i in range(len(completions))]


def steps(trainer):
    return [row["step"] for row in trainer.state.log_history]


def made(code, name="f"):
    space = {"__name__": "__main__"}
    exec(code, space)
    return space[name]


CLASS = """
class R:
    def __init__(self, w): self.w, self.calls = w, 0
    def __call__(self, c):
        self.calls += 1
        return [self.w]
    def method(self, c): return [self.w]
"""
MAKER = "def m(w):\n    def f(c): return [w]\n    return f"
SLOTS = "class S:\n    __slots__ = ('w', 'unset')\n    def __init__(self, w): self.w = w"
DATA = "import dataclasses\n@dataclasses.dataclass\nclass D:\n    w: object"
ENUM = "import enum\nclass E(enum.Enum):\n    A = 1\n    B = 2\n    def words(self): return 'a'"
Slots, Data, Choice = made(SLOTS, "S"), made(DATA, "D"), made(ENUM, "E")
# Values that a reward may hold, each with a changed one.
VALUES = [
    (re.compile("a"), re.compile("b")),
    (re.compile("a"), re.compile("a", re.IGNORECASE)),
    (re.compile(b"a"), re.compile("a")),
    (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    (fractions.Fraction(1, 3), fractions.Fraction(2, 3)),
    (pathlib.Path("a"), pathlib.Path("b")),
    (pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("a")),
    (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
    (datetime.datetime(2020, 1, 1), datetime.date(2020, 1, 1)),
    (datetime.time(1), datetime.time(2)),
    (datetime.timedelta(1), datetime.timedelta(2)),
    (datetime.timezone.utc, datetime.timezone(datetime.timedelta(hours=1))),
    (uuid.UUID(int=1), uuid.UUID(int=2)),
    (enum.Enum("E", "A B").A, enum.Enum("E", "A B").B),
    (Choice.A, Choice.B),
    (Choice.A, made(ENUM.replace("'a'", "'b'"), "E").A),
    (re.RegexFlag.I, re.RegexFlag.M),
    (1.0, 1),
    (True, 1),
    ("1", b"1"),
    (bytearray(b"1"), bytearray(b"2")),
    (1 + 2j, 1 - 2j),
    (range(3), range(4)),
    (slice(1), slice(2)),
    ((1, 2), (2, 1)),
    ((1, 2), [1, 2]),
    ({1, 2}, {1, 3}),
    (frozenset("a"), frozenset("b")),
    ({"a": 1}, {"a": 2}),
    ({"a": {"b": [re.compile("x")]}}, {"a": {"b": [re.compile("y")]}}),
    ({decimal.Decimal(1)}, {decimal.Decimal(2)}),
    ({pathlib.Path("a")}, {pathlib.Path("b")}),
    ({(1, re.compile("a"))}, {(1, re.compile("b"))}),
    (collections.deque([1]), collections.deque([2])),
    (collections.OrderedDict(a=1), collections.OrderedDict(a=2)),
    (collections.defaultdict(int, a=1), collections.defaultdict(int, a=2)),
    (collections.Counter("a"), collections.Counter("b")),
    (types.MappingProxyType({"a": 1}), types.MappingProxyType({"a": 2})),
    (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
    (collections.namedtuple("N", "a")(1), collections.namedtuple("N", "a")(2)),
    (array.array("f", [1]), array.array("f", [2])),
    (operator.itemgetter("a"), operator.itemgetter("b")),
    (operator.attrgetter("a"), operator.attrgetter("b")),
    (operator.methodcaller("a", 1), operator.methodcaller("a", 2)),
    (functools.partial(max, 1), functools.partial(max, 2)),
    (type("Own", (dict,), {})(a=1), type("Own", (dict,), {})(a=2)),
    (type("Own", (list,), {})([1]), type("Own", (list,), {})([2])),
    (Slots(1), Slots(2)),
    (Data(1), Data(2)),
    (Data(re.compile("a")), Data(re.compile("b"))),
    (numpy.array([1, 2]), numpy.array([1, 3])),
    (numpy.array([1, 2]), numpy.array([1.0, 2.0])),
    (numpy.zeros((2, 3)), numpy.zeros((3, 2))),
    (numpy.float32(1), numpy.float32(2)),
]


def holding(value):
    """Return a reward that has a value in its closure."""
    return made(MAKER, "m")(value)


@pytest.mark.parametrize(
    "one, other",
    [
        (made("def f(c): return [1.0]"), made("def f(c): return [2.0]")),
        (made("f = lambda c: [1]"), made("f = lambda c: [2]")),
        (made("async def f(c): return [1]"), made("async def f(c): return [2]")),
        (made("W = 1\ndef f(c): return [W]"), made("W = 2\ndef f(c): return [W]")),
        (made("W = {'a': [1]}\ndef f(c): return W['a']"), made("W = {'a': [2]}\ndef f(c): return W['a']")),
        (made("def g(x): return 1\ndef f(c): return [g(c)]"), made("def g(x): return 2\ndef f(c): return [g(c)]")),
        (made("def f(c, w=1): return [w]"), made("def f(c, w=2): return [w]")),
        (made("def f(c, *, w=1): return [w]"), made("def f(c, *, w=2): return [w]")),
        (made(MAKER, "m")(1), made(MAKER, "m")(2)),
        (made(CLASS, "R")(1), made(CLASS, "R")(2)),
        (made(CLASS, "R")(1), made(CLASS.replace("return [self.w]", "return [self.w + 1]"), "R")(1)),
        (made(CLASS, "R")(1).method, made(CLASS, "R")(2).method),
        (functools.partial(varied, w=1), functools.partial(varied, w=2)),
        *[(holding(one), holding(other)) for one, other in VALUES],
        (made("import functools\n@functools.lru_cache\ndef f(c): return 1"), made("import functools\n@functools.lru_cache\ndef f(c): return 2")),
        (len, max),
    ],
)
def test_a_change_of_a_function_changes_its_digest(one, other):
    assert digest(one) == digest(one) != digest(other)


def test_comments_and_state_are_no_change():
    plain = made("def f(c):\n    'doc'\n    return [1]")
    many = {str(k) for k in range(50)}
    assert digest(holding(many)) == digest(holding(set(sorted(many))))
    assert digest(plain) == digest(made("# why\n\n\ndef f(c):\n    'other'\n    return [1]  # so"))
    counted = made("n, seen = 0, []\ndef f(c):\n    global n\n    n += 1\n    seen.append(c)\n    return [n]")
    scorer, before = made(CLASS, "R")(1), digest(counted)
    counted(1)
    assert digest(counted) == before
    # So is the state of a generator of random numbers.
    dice = random.Random(1)
    rolled = made("def m(dice):\n    def f(c): return [dice.random()]\n    return f", "m")(dice)
    before = digest(rolled)
    rolled(1)
    assert digest(rolled) == before
    before = digest(scorer)
    scorer(1)
    assert scorer.calls == 1 and digest(scorer) == before
    assert digest(made(CLASS, "R")(1)) == before


def test_the_same_folder_resumes_or_trains_again_and_says_so(start, tmp_path, capfd):
    class Stop:
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 1

    def reward(word):
        def first(completions, **kwargs):
            return [float(i % 3) + len(word) for i in range(len(completions))]

        return first

    assert start(reward("a"), callbacks=[Stop]).train().metrics["interrupted"]
    resumed = start(reward("a"), settings={"save_steps": 1})
    assert resumed.train().global_step == 3 and steps(resumed) == [1, 2, 3]
    assert "resuming from" in capfd.readouterr().err and not (tmp_path / "run/superseded-1").exists()
    # A finished run is trained again.
    again = start(reward("a"), settings={"save_steps": 1})
    assert again.train().global_step == 3 and steps(again) == [1, 2, 3]
    assert "were moved to" in (said := capfd.readouterr().err) and "it is complete" in said, said
    # So is one whose reward has changed.
    other = start(reward("bb"), settings={"save_steps": 1, "max_steps": 4})
    assert other.train().global_step == 4 and steps(other) == [1, 2, 3, 4]
    assert "code of first: content has changed" in (said := capfd.readouterr().err), said
    assert (tmp_path / "run/superseded-2").is_dir()
    # If it is asked for, a finished run is left as it is.
    kept = start(reward("bb"), settings={"save_steps": 1, "max_steps": 4})
    assert kept.train(resume_from_checkpoint=True).global_step == 4 and steps(kept) == [1, 2, 3, 4]
    assert "is complete: nothing was trained" in capfd.readouterr().err and not (tmp_path / "run/superseded-3").exists()


def test_attributes_of_args_take_effect(start):
    trainer = start(varied)
    trainer.args.learning_rate = 0.0
    trainer.args.max_steps = 1
    trainer.args.logging_steps = None
    assert trainer.train().global_step == 1 and trainer.state.log_history[0]["learning_rate"] == 0.0
    args = omnigrpo.GRPOConfig()
    args.max_steps, args.output_dir = 7, "elsewhere"
    assert (args.max_steps, args.settings["max_steps"], args.output_dir.name) == (7, 7, "elsewhere")
    args.max_steps = None
    assert "max_steps" not in args.settings
    with pytest.raises(AttributeError, match="(?s)numm_generations.*num_generations"):
        args.numm_generations = 5
    with pytest.raises(ValueError, match="num_generations"):
        args.num_generations = "many"
    with pytest.raises(AttributeError, match="numm_generations"):
        args.numm_generations = None


@pytest.mark.parametrize(
    "name, instead",
    [("compute_loss", "loss_type"), ("training_step", "on_step_begin"), ("log", "on_log"), ("get_train_dataloader", "train_dataset"),
     ("_generate_and_score_completions", "environment_factory"), ("create_optimizer", "lr_scheduler_type")],
)
def test_methods_of_trl_that_are_never_called_are_refused(name, instead):
    with pytest.raises(TypeError, match=rf"Mine\.{name} overrides a method of TRL.*{instead}"):
        type("Mine", (omnigrpo.GRPOTrainer,), {name: lambda self: None})
    # Methods of one's own, and those that exist here, are.
    type("Mine", (omnigrpo.GRPOTrainer,), {"my_helper": lambda self: None, "train": lambda self: omnigrpo.GRPOTrainer.train(self)})


def test_flags_of_callbacks_are_obeyed_or_refused(start, demo, tmp_path):
    seen = []

    class Ask:
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = control.should_evaluate = control.should_log = state.global_step == 2

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            seen.append(("evaluate", state.global_step, "eval_reward" in metrics))

        def on_save(self, args, state, control, **kwargs):
            seen.append(("save", state.global_step))

        def on_epoch_begin(self, args, state, control, **kwargs):
            seen.append(("begin", state.global_step))

        def on_epoch_end(self, args, state, control, **kwargs):
            seen.append(("end", state.global_step))

    rows = [{"prompt": [{"role": "user", "content": f"Which {i}?"}], "solution": "1"} for i in range(8)]
    start(varied, rows, settings={"allow_text_only": True}, callbacks=[Ask()], eval_dataset=rows[:2]).train()
    assert seen == [
        ("begin", 1), ("end", 2), ("begin", 2), ("evaluate", 2, True), ("save", 2), ("evaluate", 3, True)
    ] and (tmp_path / "run/checkpoint-2").is_dir()

    class Skip:
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = True

    with pytest.raises(AttributeError, match="should_epoch_stop, which is unsupported"):
        start(varied, folder=tmp_path / "skip", callbacks=[Skip]).train()
    with pytest.raises(ValueError, match="should_evaluate, expected rows to evaluate on"):
        start(varied, folder=tmp_path / "none", callbacks=[Ask]).train()

    class Never:
        def on_optimizer_step(self, args, state, control, **kwargs):
            raise AssertionError

    class Inherits(Never):
        def on_substep_end(self, args, state, control, **kwargs):
            raise AssertionError

    with pytest.raises(TypeError, match=r"never come: Never\.on_optimizer_step; expected on_step_begin or on_step_end"):
        start(varied, folder=tmp_path / "never", callbacks=[Never])
    with pytest.raises(TypeError, match=r"never come: Inherits\.on_substep_end, Inherits\.on_optimizer_step"):
        start(varied, folder=tmp_path / "never", callbacks=[Inherits()])
    # A callback of a package serves several trainers.
    Package = type("Package", (), {"on_substep_end": lambda self, *args, **kwargs: None, "__module__": "pytest"})
    with pytest.warns(UserWarning, match=r"never come: Package\.on_substep_end"):
        start(varied, folder=tmp_path / "package", callbacks=[Package])


def test_text_prompts_stay_texts(start, demo, tmp_path, capfd):
    seen = []

    def keep(prompts, completions, **kwargs):
        seen.append((prompts[0], completions[0]))
        return [float(len(completion) % 5) for completion in completions]

    rows = [{"prompt": f"Count: {i},", "solution": "1"} for i in range(4)]
    start(keep, rows, settings={"max_steps": 1, "allow_text_only": True}).train()
    prompts = {prompt for prompt, _ in seen}
    assert prompts <= {row["prompt"] for row in rows} and all(isinstance(said, str) for _, said in seen)
    # A function of a file gets the same.
    (tmp_path / "mine.py").write_text(
        "def mine(prompts, completions, **k):\n    assert isinstance(prompts[0], str), prompts\n    return [float(len(c) % 5) for c in completions]\n"
    )
    start(f"{tmp_path}/mine.py:mine", rows, folder=tmp_path / "file", settings={"max_steps": 1, "allow_text_only": True}).train()
    lines = [json.loads(line) for name in ("run", "file") for line in (tmp_path / name / "rollouts/step-000001.jsonl").read_text().splitlines()]
    assert [line["completion"] for line in lines[:16]] == [line["completion"] for line in lines[16:]]
    # Messages stay messages; so do texts if they are asked to be turns, and if there is a system text.
    for name, settings in (("turns", {"continue_text_prompts": False}), ("system", {"system_prompt": "Be brief."})):
        seen.clear()
        start(keep, rows, folder=tmp_path / name, settings={"max_steps": 1, "allow_text_only": True, **settings}).train()
        assert isinstance(seen[1][0], list) and isinstance(seen[1][1], list), name
    assert "prompts are texts: the chat template makes turns" in capfd.readouterr().err


def test_a_reward_that_teaches_nothing_is_named(start, capfd):
    def nothing(completions, **kwargs):
        return [None] * len(completions)

    def flat(completions, **kwargs):
        return [0.5] * len(completions)

    start([nothing, flat], settings={"max_steps": 1}).train()
    said = capfd.readouterr().err
    assert "`nothing` gave no value (none) to all 16 completions of step 1" in said
    assert "`flat` gave 0.5 to all 16 completions of step 1" in said


def test_a_reward_of_whole_groups_trains(start):
    def ranked(completions, **kwargs):
        groups = [completions[at : at + 4] for at in range(0, len(completions), 4)]
        assert all(len(group) == 4 for group in groups)
        return [float(sorted(group, key=lambda c: len(c[0]["content"])).index(one)) for group in groups for one in group]

    assert start(ranked, settings={"max_steps": 1}).train().global_step == 1


def test_settings_of_loading_are_refused_by_a_loaded_model(demo):
    rows, short = ["What colour is the circle?"], {"max_completion_length": 2, "temperature": 0}
    model = omnigrpo.Model(demo / "model", dtype="bfloat16")
    assert model.generate(rows, **short) == model.generate(rows, **short, dtype="bfloat16")
    for name, value in {"bf16_products": "widened", "load_in_8bit": True, "dtype": "float32"}.items():
        with pytest.raises(ValueError, match=f"`.*{name}` acts when a model is loaded"):
            model.generate(rows, **short, **{name: value})
        with pytest.raises(ValueError, match=f"`.*{name}` acts when a model is loaded"):
            model.score({"prompt": rows[0]}, ["red"], **{name: value})
