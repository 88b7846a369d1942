"""`duopack rules`: the rules as docs/rules.md, or as JSON."""

from __future__ import annotations

import argparse

from pipeline.ascend.rules.page import as_rows, rules_page
from pipeline.reports.output import print_json, print_text


def run(options: argparse.Namespace) -> int:
    if options.json:
        print_json(as_rows())
    else:
        print_text(rules_page().rstrip("\n"))
    return 0
