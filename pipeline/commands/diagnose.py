"""`duopack diagnose`: what happened to a server, from its log or its container."""

from __future__ import annotations

import argparse
import sys

from pipeline.reports.output import print_json, print_text
from pipeline.serving.diagnosis import State
from pipeline.serving.telling import as_text, as_value
from pipeline.stages.diagnose import diagnose_log


def run(options: argparse.Namespace) -> int:
    if options.table:
        return _print_table(as_json=options.json)
    diagnosis = diagnose_log(options.log)
    if options.json:
        print_json(as_value(diagnosis, options.log))
    else:
        plain = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
        print_text(as_text(diagnosis, options.log, plain=plain))
    return 1 if diagnosis.failed or diagnosis.state is State.NOTHING else 0


def _print_table(*, as_json: bool) -> int:
    from pipeline.serving.failures.page import as_rows, failures_page

    if as_json:
        print_json(as_rows())
    else:
        print_text(failures_page().rstrip("\n"))
    return 0
