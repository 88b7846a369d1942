"""The program: `duopack`, or `python -m pipeline`."""

import sys


def start() -> int:
    """Runs the command line. Ctrl-C ends it in one line from the first import on, not only inside a command."""
    try:
        from pipeline.cli import main

        return main()
    except KeyboardInterrupt:
        sys.stderr.write("duopack: error: interrupted.\n")
        return 130


if __name__ == "__main__":
    sys.exit(start())
