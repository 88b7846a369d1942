"""`duopack verify`: whether an image is what it claims to be, and will serve."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from pipeline.commands.common import settings_of, showing
from pipeline.commands.looking import asking_of, find_image, open_image
from pipeline.errors import UsageError
from pipeline.files import human_size
from pipeline.lock.values import read_lock
from pipeline.oci.reference import Reference
from pipeline.reports.output import print_json, print_text
from pipeline.stages.verify.finding import lines
from pipeline.stages.verify.report import Report, verify
from pipeline.stages.verify.weights import CheckedModel


def run(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    if options.locked and not settings.lock.is_file():
        raise UsageError(
            "there is no lock to hold the image against",
            where=str(settings.lock),
            mend="name the catalog beside it with --catalog, or leave out --locked",
        )
    reference = find_image(options.image, settings)
    with showing(options) as progress:
        reports = verify(
            open_image(reference, settings, progress),
            reference.wanted,
            asking_of(options, settings, progress, str(reference)),
            lock=read_lock(settings.lock) if settings.lock.is_file() else None,
            locked=options.locked,
        )
    if options.json:
        print_json({"image": str(reference), "images": [as_json(report) for report in reports]})
    else:
        print_text("\n\n".join(as_text(report, reference) for report in reports))
    return 0 if all(report.is_sound for report in reports) else 1


def as_json(report: Report) -> dict[str, Any]:
    """A report for machines."""
    return {
        "sound": report.is_sound,
        "digest": report.digest,
        "platform": report.platform,
        "deep": report.deep,
        "layers": report.layers,
        "base": {"layers": report.base_layers, "told_by": report.base_told_by},
        "size": report.size,
        "read": report.read,
        "seconds": report.seconds,
        "command": list(report.command),
        "models": [_model_json(model) for model in report.models],
        "findings": [asdict(finding) for finding in report.findings],
    }


def as_text(report: Report, reference: Reference) -> str:
    """A report for people."""
    what = "every byte" if report.deep else f"{human_size(report.read)} of it"
    head = [
        f"{reference} ({report.platform or 'no platform'})",
        f"  digest    {report.digest}",
        f"  layers    {report.layers}, {human_size(report.size)}; {report.base_layers} of the base",
        f"  read      {what}, in {report.seconds:.1f} s",
        *(f"  weights   {_model_text(model)}" for model in report.models),
    ]
    return "\n".join([*head, *lines(report.findings), _verdict(report)])


def _model_json(model: CheckedModel) -> dict[str, Any]:
    directory, summary = model.directory, model.summary
    return {
        "directory": f"/{directory.path}",
        "key": directory.key or None,
        "title": directory.title or None,
        "load_format": directory.load_format,
        "tensor_parallel": directory.tensor_parallel,
        "whole": summary is not None,
    } | (
        {
            "files": len(summary.files),
            "tensors": summary.tensors,
            "size": summary.size,
            "dtypes": sorted(summary.dtypes),
            "quantized": summary.quantized,
            "ranks": summary.ranks,
        }
        if summary
        else {}
    )


def _model_text(model: CheckedModel) -> str:
    directory, summary = model.directory, model.summary
    title = f"{directory.title}: " if directory.title else ""
    if summary is None:
        return f"{title}/{directory.path}: see below"
    split = f", split for TP {summary.ranks}" if summary.ranks else ""
    return (
        f"{title}/{directory.path}: {len(summary.files)} files, {summary.tensors} tensors, "
        f"{human_size(summary.size)}, {'+'.join(sorted(summary.dtypes))}{split}"
    )


def _verdict(report: Report) -> str:
    counts = {
        kind: sum(1 for one in report.findings if one.severity == kind) for kind in ("error", "warning")
    }
    warnings = f"{counts['warning']} warning" + ("" if counts["warning"] == 1 else "s")
    if not report.is_sound:
        errors = f"{counts['error']} error" + ("" if counts["error"] == 1 else "s")
        return f"NOT SOUND: {errors}, {warnings}."
    depth = "every byte was read" if report.deep else "by headers and sizes; --deep reads every byte"
    return f"Sound: no errors, {warnings} ({depth})."
