"""The program `omnigrpo`."""

import signal
import sys

from ._omnigrpo import main as _main


def main() -> int:
    """Run the program with the arguments of this process and return its exit code."""
    # The program handles Ctrl-C and closed pipes itself.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _main(["omnigrpo", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
