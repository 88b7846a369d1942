"""What the commands' arguments have in common."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn, Protocol

from pipeline.errors import UsageError

PLATFORMS = ("linux/arm64", "linux/amd64")


class Add(Protocol):
    """Adds a command; `text` says what it does, `module` is its module in pipeline.commands when named otherwise."""

    def __call__(
        self, name: str, text: str, *, module: str | None = None, json_output: bool = True
    ) -> argparse.ArgumentParser: ...


class Parser(argparse.ArgumentParser):
    """Wrong arguments are a UsageError like any other wrong use, so that --json holds for them too."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, mend=f"see '{self.prog} --help'")


def add_common(command: argparse.ArgumentParser, *, json_output: bool) -> None:
    """The options of every command."""
    command.add_argument("--catalog", type=Path, metavar="FILE", help="the catalog (default: models.yaml)")
    command.add_argument(
        "--work", type=Path, metavar="DIR", help="where downloads and images go (default: build)"
    )
    command.add_argument("--quiet", action="store_true", help="only warnings and the result")
    command.add_argument("--debug", action="store_true", help="show a traceback on errors")
    if json_output:
        command.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    else:
        command.set_defaults(json=False)
