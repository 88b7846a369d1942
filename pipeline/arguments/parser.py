"""The parser of the command line, put together from the commands' arguments."""

from __future__ import annotations

import argparse

from pipeline import __version__
from pipeline.arguments import catalog, images, servers, weights
from pipeline.arguments.common import Parser, add_common

DESCRIPTION = "From a line in models.yaml to a verified, ready-to-serve Qwen image for Atlas 300I Duo (310P)."
EPILOG = """\
DEST and IMAGE are written as skopeo does:
  docker://HOST/REPOSITORY[:TAG]   a registry          oci:DIR[:TAG]              an OCI layout
  docker-archive:FILE[:NAME:TAG]   for 'docker load'   docker-daemon:NAME:TAG     the local engine
Exit codes: 0 done, 1 a check or a stage failed, 2 wrong use, 130 interrupted.
"""


def make_parser() -> argparse.ArgumentParser:
    """Options that were parsed have `module`, the command's module in pipeline.commands."""
    parser = Parser(
        prog="duopack",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"duopack {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")

    def add(
        name: str, text: str, *, module: str | None = None, json_output: bool = True
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(module=module or name)
        add_common(command, json_output=json_output)
        return command

    for subject in (catalog, weights, images, servers):
        subject.add_commands(add)
    return parser
