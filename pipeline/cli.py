"""The command line: arguments in, exit code out; what the commands do is in `pipeline.commands`."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from pipeline.arguments.parser import make_parser
from pipeline.errors import DuopackError, UsageError, quoted
from pipeline.files import mend_of

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; errors go to stderr in one paragraph, results to stdout."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        # A file name that is no UTF-8, or a terminal that has no Chinese, must not end a build.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        options = make_parser().parse_args(words)
    except UsageError as error:
        return _fail(error, "", as_json="--json" in words)
    # A CI runner ends a job with SIGTERM: leave as cleanly as on Ctrl-C.
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(options)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: argparse.Namespace) -> int:
    """The command's exit code; whatever it raises becomes a paragraph and a code."""
    try:
        command = importlib.import_module(f"pipeline.commands.{options.module}")
        code: int = command.run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        ended = DuopackError("interrupted: what is complete is kept, the same command goes on from there")
        _fail(ended, options.command, as_json=options.json)
        return INTERRUPTED
    except BrokenPipeError as error:
        if _drop_streams_without_reader():
            # Whoever read our output left (`duopack list | head`): nothing to say, and nowhere to say it.
            return 1
        fault: Exception = error
    except Exception as error:
        fault = error
    if options.debug:
        traceback.print_exception(fault)
    return _fail(_told(fault, options.command), options.command, as_json=options.json)


def _told(fault: Exception, command: str) -> DuopackError:
    """Any failure as the paragraph that a person reads."""
    if isinstance(fault, DuopackError):
        return fault
    hint = "run it again with --debug to see where it happened"
    if isinstance(fault, OSError):
        name = str(fault.filename) if fault.filename else ""
        return DuopackError(
            quoted(fault.strerror or str(fault)), where=quoted(name), mend=mend_of(fault) or hint
        )
    what = f"a fault of duopack itself: {type(fault).__name__}: {quoted(str(fault), 400)}"
    return DuopackError(what, where=command, mend=f"{hint}, and report that")


def _fail(error: DuopackError, command: str, *, as_json: bool) -> int:
    kind = "wrong use" if isinstance(error, UsageError) else "error"
    with suppress(OSError):
        if as_json:
            from pipeline.reports.output import print_json

            print_json({"error": {"what": error.what, "where": error.where, "mend": error.mend}})
            sys.stdout.flush()
    with suppress(OSError):
        sys.stderr.write(f"{f'duopack {command}'.rstrip()}: {kind}: {error}\n")
        sys.stderr.flush()
    return error.exit_code


def _open_missing_streams() -> None:
    """Gives a process that was started without stdout or stderr (`>&-`) one that leads nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115


def _drop_streams_without_reader() -> bool:
    """Points stdout and stderr, where nobody reads them any more, to nowhere; returns whether one was so."""
    dropped = False
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            poll = select.poll()
            poll.register(stream.fileno(), select.POLLOUT)
            if any(events & select.POLLERR for _, events in poll.poll(0)):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                dropped = True
    return dropped


def _interrupt(number: int, frame: object) -> NoReturn:
    del number, frame
    raise KeyboardInterrupt
