"""`duopack schema`: the JSON schema of models.yaml."""

from __future__ import annotations

import argparse

from pipeline.catalog.export import schema_text
from pipeline.reports.output import print_text


def run(options: argparse.Namespace) -> int:  # noqa: ARG001
    print_text(schema_text().rstrip("\n"))
    return 0
