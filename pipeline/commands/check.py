"""`duopack check`: the rules for 310P, held against the catalog's profiles; or another thing that an option names."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from pipeline.ascend.rules import Severity
from pipeline.catalog.load import load_catalog
from pipeline.catalog.target import find_target
from pipeline.commands.common import settings_of
from pipeline.errors import UsageError
from pipeline.reports.output import print_json, print_text
from pipeline.stages.launch import check


def run(options: argparse.Namespace) -> int:
    if options.script or options.line is not None:
        from pipeline.commands import check_line

        return check_line.run(options)
    if options.weights:
        from pipeline.commands import check_weights

        return check_weights.run(options)
    if options.shards:
        from pipeline.commands import check_shards

        return check_shards.run(options)
    if options.tp is not None:
        raise UsageError("--tp goes with --shards", where="--tp", mend="leave it out")
    if options.repair:
        raise UsageError("--repair goes with --weights", where="--repair", mend="leave it out")
    if options.fix:
        raise UsageError("--fix goes with --script or --command", where="--fix", mend="leave it out")
    return _profiles(options)


def _profiles(options: argparse.Namespace) -> int:
    catalog = load_catalog(settings_of(options).catalog)
    findings = {}
    for key in options.keys or catalog.models:
        target = find_target(catalog, key, base=options.base)
        for _, model in target.models:
            for name, profile in model.profiles.items():
                findings[name] = check(name, model, profile, target.base)
    failed = any(one.severity is Severity.ERROR for found in findings.values() for one in found)
    if options.json:
        print_json({name: [asdict(one) for one in found] for name, found in findings.items()})
        return 1 if failed else 0
    for name, found in findings.items():
        print_text(
            f"{name}: "
            + ("no findings" if not found else f"{len(found)} finding{'s' if len(found) > 1 else ''}")
        )
        for one in found:
            print_text(f"  {one.severity}: {one.sentence}. To mend: {one.mend} [{one.id}; {one.source}]")
    return 1 if failed else 0
