"""The program `omnigrpo`."""

import signal
import sys

from ._omnigrpo import main as _main


def main() -> int:
    """Run the program with the arguments of this process and return its exit code."""
    # The program handles Ctrl-C and closed pipes itself.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = sys.argv[1:]
    return _main(["omnigrpo", *arguments], [sys.executable, "-m", "omnigrpo", *arguments])


if __name__ == "__main__":
    sys.exit(main())
