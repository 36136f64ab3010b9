import signal

import pytest

import omnigrpo


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes minutes; the stage `trl` runs it")
    # A shell starts jobs in the background with interrupts ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    omnigrpo.write_demo(folder, train=32, eval=8)
    return folder


SETTINGS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_generations": 4,
    "max_completion_length": 12,
    "learning_rate": 3e-4,
    "dtype": "float32",
    "max_steps": 3,
}


@pytest.fixture
def start(demo, tmp_path):
    """Return a function that makes a trainer on the demo."""

    def make(rewards, rows=None, folder=tmp_path / "run", kind=omnigrpo.GRPOTrainer, **others):
        settings = {**SETTINGS, **others.pop("settings", {})}
        args = omnigrpo.GRPOConfig(folder, **settings)
        return omnigrpo.GRPOTrainer(demo / "model", rewards, args, rows or demo / "data/train.jsonl", **others)

    return make
