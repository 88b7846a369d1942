"""`duopack check --weights DIR`: would these quantized weights load and answer on 310P, and can they be mended."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from pipeline.commands.common import require_directory, showing
from pipeline.reports.output import print_json, print_text
from pipeline.weights.quant.checks import REPAIR, check_quantized
from pipeline.weights.quant.repair import repair
from pipeline.weights.shards.check import Finding, report


def run(options: argparse.Namespace) -> int:
    directory: Path = options.weights
    require_directory(directory, "a directory of quantized weights")
    with showing(options) as progress:
        findings = repair(directory, progress.note) if options.repair else check_quantized(directory)
    failed = any(one.severity == "error" for one in findings)
    if options.json:
        print_json([asdict(one) for one in findings])
    else:
        print_text("\n".join(_lines(directory, findings)))
    return 1 if failed else 0


def _lines(directory: Path, findings: tuple[Finding, ...]) -> tuple[str, ...]:
    if not findings:
        return (f"{directory}: nothing found that would keep these weights from 310P",)
    mendable = sum(one.mend == REPAIR for one in findings)
    hint = f"{mendable} can be repaired without the source: add --repair"
    return (*report(findings), *([hint] if mendable else []))
