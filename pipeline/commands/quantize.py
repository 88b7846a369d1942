"""`duopack quantize`: a directory of float weights into one of quantized weights for 310P."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from pipeline.commands.common import settings_of, showing
from pipeline.files import human_size
from pipeline.reports.output import print_json, print_text, table
from pipeline.stages.quantize.engines import open_engines
from pipeline.stages.quantize.stage import Quantized, quantize


def run(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    with showing(options) as progress:
        made = quantize(
            options.src,
            options.dst,
            progress,
            recipe=options.recipe,
            engine=options.engine,
            engines=open_engines(settings, device=options.device, ranks=options.tp),
            allow_nonfinite=options.allow_nonfinite,
        )
    if options.json:
        print_json(_as_json(made))
    else:
        print_text(_as_text(made))
    return 0


def _as_json(made: Quantized) -> dict[str, object]:
    return {
        "directory": str(made.directory),
        "new": made.new,
        "seconds": made.seconds,
        "size_before": made.size_before,
        "size": made.size,
        "record": asdict(made.record),
    }


def _as_text(made: Quantized) -> str:
    record = made.record
    done = f"made in {made.seconds:.1f} s" if made.new else "was there already, made from the same source"
    rows = [("", "quantized", "float", "largest error", "")]
    for group in record.groups:
        error = "–" if group.error is None else f"{group.error:.2%}"
        rows.append((group.name, str(group.quantized), str(group.left_float), error, group.worst or ""))
    return "\n".join(
        (
            f"{made.directory}: {record.recipe} by {record.engine} {record.engine_version}, "
            f"{human_size(made.size_before)} → {human_size(made.size)}, {done}.",
            table(rows),
            *record.notes,
        )
    )
