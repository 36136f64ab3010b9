"""The line of a script that shows a run."""

import io
import sys

import pytest
from omnigrpo._progress import Progress


@pytest.mark.parametrize(("steps", "last"), [(5, "5/5 [████████████████████] · done · reward 0.5"), (3, "3/5 [████████████        ] · stopped")])
def test_the_line_ends_with_the_last_step(monkeypatch, steps, last):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress()
    progress.rewards = [0.5]
    progress.show({"done": 2, "total": 5, "phase": "forward", "left_secs": 1, "is_reward": True})
    progress.finish(steps)
    progress.close()
    assert last in terminal.getvalue().split("\r\x1b[K")[-1]
    assert terminal.getvalue().endswith("\n")


def test_a_run_that_shows_nothing_ends_without_a_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    progress = Progress()
    progress.show({"done": 2, "total": 5, "phase": "forward", "left_secs": 1, "is_reward": True})
    progress.finish(5)
    progress.close()
    assert sys.stderr.getvalue() == ""
