"""One line of progress, in a terminal or in a notebook."""

import sys
import time

_BARS = "▁▂▃▄▅▆▇█"


def _chart(values, width=30):
    """Return a chart of the last values, scaled to their range."""
    values = values[-width:]
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0
    return "".join(_BARS[int((value - low) * scale)] for value in values)


class Progress:
    """Shows step, phase, time left and the course of the reward."""

    def __init__(self, off=False):
        self.rewards, self._text, self._cell, self._last = [], "", None, 0.0
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        self._notebook = hasattr(shell, "kernel")
        self._on = not off and (self._notebook or sys.stderr.isatty())

    def show(self, state):
        """Show the state of a run, at most five times a second."""
        if not self._on or time.monotonic() - self._last < 0.2:
            return
        self._last = time.monotonic()
        done, total, left = state["done"], state["total"], state["left_secs"]
        filled = round(20 * done / max(1, total))
        parts = [f"{done}/{total} [{'█' * filled}{' ' * (20 - filled)}]", state["phase"]]
        if left is not None:
            parts.append(f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left")
        if self.rewards:
            parts.append(f"reward {self.rewards[-1]:.3g} {_chart(self.rewards)}")
        self._write(" · ".join(parts))

    def _write(self, text):
        if not self._notebook:
            print("\r\x1b[K" + text, end="", file=sys.stderr, flush=True)
        else:
            from IPython.display import display

            shown = {"text/plain": text}
            if self._cell is None:
                self._cell = display(shown, raw=True, display_id=True)
            else:
                self._cell.update(shown, raw=True)
        self._text = text

    def close(self):
        """Leave the last state in place, and end the line."""
        if self._text and not self._notebook:
            print(file=sys.stderr)
        self._text = ""
