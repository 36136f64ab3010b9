"""Progress of a run, in a terminal or in a notebook."""

import html
import re
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
    """Shows step, phase, time left and the course of the reward, and lines for the user."""

    def __init__(self, off=False, quiet=False):
        self.rewards, self._shown, self._cell, self._last, self._total = [], False, None, 0.0, 0
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        self.notebook, self._quiet = hasattr(shell, "kernel"), quiet
        self._on = not off and not quiet and (self.notebook or sys.stderr.isatty())

    def show(self, state):
        """Show the state of a run, at most five times a second, and before each reward, which may take long."""
        if not self._on or time.monotonic() - self._last < 0.2 and not state["is_reward"]:
            return
        self._last = time.monotonic()
        done, total, left = state["done"], state["total"], state["left_secs"]
        self._total = total
        filled = round(20 * done / max(1, total))
        parts = [f"{done}/{total} [{'█' * filled}{' ' * (20 - filled)}]", state["phase"]]
        if left is not None:
            parts.append(f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left")
        if self.rewards:
            parts.append(f"reward {self.rewards[-1]:.3g} {_chart(self.rewards)}")
        text, self._shown = " · ".join(parts), True
        if not self.notebook:
            print("\r\x1b[K" + text, end="", file=sys.stderr, flush=True)
        elif self._cell is None:
            self._cell = self._display({"text/plain": text}, display_id=True)
        else:
            self._cell.update({"text/plain": text}, raw=True)

    def _display(self, content, **how):
        from IPython.display import display

        return display(content, raw=True, **how)

    def line(self, text):
        """Show a line of the run. An address becomes a link in a notebook."""
        if self._quiet:
            return
        if self.notebook and "http://" in text:
            link = re.sub(r"https?://[^\s`]+", lambda url: f'<a href="{url[0]}" target="_blank">{url[0]}</a>', html.escape(text))
            self._display({"text/plain": text, "text/html": link})
        else:
            self.close()
            print(text, file=sys.stderr)

    def finish(self, steps):
        """Show that a run has ended after so many steps, unless it never showed a state."""
        if self._shown:
            phase = "done" if steps >= self._total else "stopped"
            self.show({"done": steps, "total": self._total, "phase": phase, "left_secs": None, "is_reward": True})

    def close(self):
        """Leave the last state in place, and end its line."""
        if self._shown and not self.notebook:
            print(file=sys.stderr)
        self._shown = False
