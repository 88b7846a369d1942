"""`duopack check --shards DIR`: what vLLM would make of weights that are split per rank."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from pipeline.commands.common import require_directory
from pipeline.reports.output import print_json, print_text
from pipeline.weights.shards.check import check_shards, report


def run(options: argparse.Namespace) -> int:
    require_directory(options.shards, "a directory of weights split per rank")
    findings = check_shards(options.shards, tensor_parallel=options.tp, hash_files=True)
    if options.json:
        print_json([asdict(one) for one in findings])
    elif findings:
        print_text("\n".join(report(findings)))
    else:
        print_text(f"{options.shards}: exactly what vLLM expects")
    return 1 if any(one.severity == "error" for one in findings) else 0
