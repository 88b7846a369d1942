"""`duopack check --script FILE` and `--command '…'`: commands that somebody wrote, judged and corrected."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pipeline.ascend.rules import Finding, Severity
from pipeline.catalog.load import load_catalog
from pipeline.catalog.target import find_base
from pipeline.commands.common import settings_of
from pipeline.errors import UsageError
from pipeline.hubs.faults import read_errors
from pipeline.reports.output import print_json, print_text
from pipeline.stages.review import Reviewed, review


def run(options: argparse.Namespace) -> int:
    if len(options.keys) > 1:
        raise UsageError(
            "one KEY at most says which model a command serves", where="KEY", mend="leave out the others"
        )
    if options.script and options.line:
        raise UsageError("--script and --command exclude each other", mend="give one of them")
    catalog = load_catalog(settings_of(options).catalog)
    text, where = (_read(options.script), options.script) if options.script else (options.line, "command")
    key = options.keys[0] if options.keys else None
    reviewed = review(text, catalog, find_base(catalog, options.base), where=where, key=key)
    left = [one.remaining if options.fix else one.findings for one in reviewed]
    if options.json:
        print_json([asdict(one) for one in reviewed])
    elif options.fix:
        print_text("\n\n".join(_as_fixed(one) for one in reviewed))
    else:
        print_text("\n".join(_as_text(one) for one in reviewed))
    return 1 if any(one.severity is Severity.ERROR for found in left for one in found) else 0


def _read(name: str) -> str:
    if name == "-":
        return sys.stdin.read()
    with read_errors(Path(name)):
        data = Path(name).read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError("this is no text in UTF-8", where=name, mend="give a shell script") from error


def _as_text(one: Reviewed) -> str:
    return "\n".join([f"{one.where}: {_what(one)}: {_count(one.findings)}", *_lines(one.findings)])


def _as_fixed(one: Reviewed) -> str:
    """The corrected command, and as comments what no program can decide."""
    head = [f"# {one.where}: {_what(one)}"]
    fixed = [one.fixed] if one.fixed else []
    return "\n".join([*head, *(f"# {line.strip()}" for line in _lines(one.remaining)), *fixed])


def _what(one: Reviewed) -> str:
    names = {
        "serve": f"vllm serve, {one.model}",
        "docker": f"docker run, {one.model}",
        "image": "an image is made",
    }
    return names[one.kind]


def _count(findings: Sequence[Finding]) -> str:
    return "no findings" if not findings else f"{len(findings)} finding{'s' if len(findings) > 1 else ''}"


def _lines(findings: Sequence[Finding]) -> list[str]:
    return [
        f"  {one.severity}: {one.sentence}. To mend: {one.mend} [{one.id}; {one.source}]" for one in findings
    ]
