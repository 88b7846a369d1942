"""`duopack bases`: what there is to build on; `duopack bases build` makes one from a checkout."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from pipeline.catalog.load import load_catalog
from pipeline.commands.common import settings_of, showing
from pipeline.errors import UsageError, quoted
from pipeline.files import human_size
from pipeline.lock.values import read_lock
from pipeline.reports.output import print_json, print_text
from pipeline.stages.bases import DOCKERFILE, BaseReport, BuiltBase, Tags, build_base, find_tags, report_bases

_SHOWN = 12
"""Digits of a digest that people compare."""


def run(options: argparse.Namespace) -> int:
    return _build(options) if options.action == "build" else _list(options)


def _list(options: argparse.Namespace) -> int:
    if options.source or options.name:
        raise UsageError("--source and --name belong to 'duopack bases build'", mend="write 'bases build'")
    settings = settings_of(options)
    catalog = load_catalog(settings.catalog)
    reports = report_bases(catalog, read_lock(settings.lock))
    tags: list[Tags] = []
    if options.tags:
        with showing(options) as progress:
            tags += find_tags(catalog, settings.catalog.parent, progress)
    if options.json:
        print_json([_as_json(report, tags) for report in reports])
    else:
        print_text("\n\n".join([*map(_as_text, reports), *map(_tags_text, tags)]))
    return 0


def _build(options: argparse.Namespace) -> int:
    if options.source is None or options.tags:
        raise UsageError(
            "a base is built from a checkout", mend="write: duopack bases build --source DIR --name KEY"
        )
    from pipeline.oci.engine_build import Builder

    settings = settings_of(options)
    catalog = load_catalog(settings.catalog) if settings.catalog.exists() else None
    platform = options.platform or (catalog.default_platform if catalog else "linux/arm64")
    with showing(options) as progress:
        made = build_base(
            options.source,
            options.name or "local",
            platform,
            catalog,
            settings,
            progress,
            dockerfile=options.file or DOCKERFILE,
            arguments=_arguments(options.build_arg),
            network=options.network,
            builder=Builder.CLASSIC if options.builder == "docker-classic" else Builder.BUILDKIT,
        )
    if options.json:
        print_json(asdict(made))
    else:
        print_text(_built_text(made))
    return 0


def _arguments(words: list[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    if wrong := [name for name, equals, _ in pairs if not name or not equals]:
        raise UsageError(
            f"'{quoted(wrong[0])}' is not NAME=VALUE",
            where="--build-arg",
            mend="write --build-arg VLLM_TAG=v0.20.2",
        )
    return {name: value for name, _, value in pairs}


def _as_json(report: BaseReport, tags: list[Tags]) -> dict[str, Any]:
    value = {
        "key": report.key,
        "default": report.is_default,
        **report.base.model_dump(mode="json"),
        "locked": report.stale is None,
        "why_not_locked": report.stale,
        "digests": dict(report.digests),
        "abilities": [
            {"id": one.id, "verdict": one.verdict.value, "sentence": one.sentence, "source": one.source}
            for one in report.abilities
        ],
    }
    mine = next(
        (one for one in tags if one.image in {image.rpartition(":")[0] for image in report.base.images}), None
    )
    return value | ({"repository": mine.image, "tags": list(mine.tags)} if mine else {})


def _as_text(report: BaseReport) -> str:
    base = report.base
    versions = {
        "vLLM": base.vllm,
        "vllm-ascend": base.vllm_ascend,
        "CANN": base.cann,
        "Python": base.python,
        "driver": base.driver,
    }
    known = ", ".join(f"{name} {version or 'not known'}" for name, version in versions.items())
    lines = [report.key + (" (default)" if report.is_default else ""), f"  {known}"]
    lines += [
        f"  {'image ' if not number else 'mirror'}  {image}" for number, image in enumerate(base.images)
    ]
    lines += [f"  locked  {name}  {digest}" for name, digest in report.digests.items()]
    if report.stale:
        lines.append(f"  not locked: {report.stale}")
    lines += [f"  {one.verdict.value:<7}  {one.sentence} [{one.source}]" for one in report.abilities]
    return "\n".join([*lines, *([f"  {base.note}"] if base.note else [])])


def _tags_text(found: Tags) -> str:
    ours = [tag for tag in found.tags if "310p" in tag]
    others = len(found.tags) - len(ours)
    return "\n".join(
        [
            f"{found.image}: {len(ours)} tags for 310P, {others} others",
            *(f"  {tag}" for tag in reversed(ours)),
        ]
    )


def _built_text(made: BuiltBase) -> str:
    lines = [
        f"{made.name}: {made.image}",
        f"  digest    {made.digest} ({made.platform}, {human_size(made.size)})",
        f"  image id  {made.image_id}",
    ]
    if made.locked:
        return "\n".join([*lines, f"models.lock has it: duopack build KEY --base {made.key}"])
    known = [f'    {name}: "{value}"' for name, value in made.known.items()]
    missing = [
        f'    {name}: "…"  # not told by the checkout'
        for name in ("vllm", "vllm_ascend")
        if name not in made.known
    ]
    return "\n".join(
        [
            *lines,
            f"Use it as it is: duopack build KEY --base {made.image}@{made.digest}",
            "Or enter it into models.yaml under 'bases', and run 'duopack lock':",
            f"  {made.key}:",
            f'    images: ["{made.image}"]',
            f"    platforms: [{made.platform}]",
            *known,
            *missing,
        ]
    )
