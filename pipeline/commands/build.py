"""`duopack build`: from a key of the catalog to an image where it shall be."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.catalog.load import load_catalog
from pipeline.catalog.schema import Catalog, Source
from pipeline.catalog.target import ALL, Target, platforms_of, targets
from pipeline.commands.common import destination_of, settings_of, showing
from pipeline.errors import UsageError
from pipeline.files import human_size
from pipeline.hubs import open_hub
from pipeline.hubs.hub import Hub
from pipeline.lock.values import LockedModel
from pipeline.oci.reference import Reference, parse_reference, parse_typed
from pipeline.reports.output import print_json, print_text
from pipeline.reports.progress import Progress
from pipeline.settings import Settings
from pipeline.stages.build import Built, Planned, build, plan, prepare, require_destination
from pipeline.stages.locking import ensure_locked, parse_source
from pipeline.stages.making import make_models, refuse_plan_of_made
from pipeline.stages.platforms import build_platforms

if TYPE_CHECKING:
    from pipeline.oci.engine_build import Builder


def run(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    catalog = load_catalog(settings.catalog)
    base_name, base_image = _base(options.base, catalog)
    if bool(options.keys) == options.all:
        raise UsageError(
            "the following arguments are required: KEY, or --all and no KEY",
            mend="'duopack list' shows the keys; see 'duopack build --help'",
        )
    keys = (ALL,) if options.all else tuple(options.keys)
    # For each key a target a platform, which differ in nothing else.
    by_platform = [
        targets(catalog, keys, base=base_name, platform=platform, profile=options.profile)
        for platform in platforms_of(catalog, options.platform, base_name)
    ]
    chosen = by_platform[0]
    if options.to and len(chosen) > 1:
        raise UsageError("--to is for one image", where="--to", mend="build the keys one by one")
    source = parse_source(options.source) if options.source else None
    if (source and any(len(target.models) > 1 for target in chosen)) or (source and len(chosen) > 1):
        raise UsageError("--source is for one model", where="--source", mend="build the models one by one")
    if options.locked and base_image and not base_image.digest:
        raise UsageError(
            "with --locked a base is given by digest",
            where="--base",
            mend=f"write {base_image}@sha256:…, or leave out --locked",
        )
    if len(by_platform) > 1 and options.builder != "duopack":
        raise UsageError(
            "docker builds for one platform at a time",
            where="--builder",
            mend="give one --platform, or leave out --builder",
        )
    results: list[Built | Planned] = []
    with showing(options) as progress:
        for alike in zip(*by_platform, strict=True):
            destination = _destination(options.to, catalog, alike, settings)
            made = _one(options, catalog, alike, settings, destination, source, base_image, progress)
            results += made
            if not options.json:
                print_text("\n".join(map(_summary, made)))
    if options.json:
        print_json([asdict(result) for result in results])
    return 0


def _one(
    options: argparse.Namespace,
    catalog: Catalog,
    alike: Sequence[Target],
    settings: Settings,
    destination: Reference,
    source: Source | None,
    base_image: Reference | None,
    progress: Progress,
) -> Sequence[Built | Planned]:
    for target in alike:
        lock = ensure_locked(
            target, settings, progress, locked=options.locked, source=source, needs_base=base_image is None
        )
    if options.dry_run:
        refuse_plan_of_made(alike[0])
        planned = [plan(one, catalog, lock, settings, destination, base_image) for one in alike]
        if not _builder(options):
            return planned
        from pipeline.stages.docker_builder import dockerfile_of

        parts = prepare(alike[0], catalog, lock, settings, destination, base_image)
        return [replace(planned[0], dockerfile=dockerfile_of(parts))]
    target = alike[0]
    hubs = {key: _hub(target, key, lock.models[key], source, settings) for key, _ in target.models}
    if any(model.made for _, model in target.models):
        # Hours may go into making: what a rule, the base or the destination refuses is found before.
        require_destination(prepare(target, catalog, lock, settings, destination, base_image))
        lock, hubs = make_models(target, lock, settings, hubs, progress)
    if builder := _builder(options):
        from pipeline.stages.docker_builder import build_with_docker

        parts = prepare(target, catalog, lock, settings, destination, base_image)
        return [build_with_docker(parts, hubs, builder, progress)]
    if len(alike) > 1:
        return [build_platforms(alike, catalog, lock, settings, destination, hubs, progress, base_image)]
    return [build(target, catalog, lock, settings, destination, hubs, progress, base_image)]


def _builder(options: argparse.Namespace) -> Builder | None:
    """The engine's builder that was asked for; None for our own."""
    if options.builder == "duopack":
        return None
    from pipeline.oci.engine_build import Builder

    return Builder.BUILDKIT if options.builder == "docker" else Builder.CLASSIC


def _destination(to: str | None, catalog: Catalog, alike: Sequence[Target], settings: Settings) -> Reference:
    """Where the image goes: of several platforms under the name without one."""
    if to:
        return parse_typed(to)
    target = alike[0]
    if len(alike) > 1:
        target = replace(target, platform=catalog.default_platform)
    return parse_reference(destination_of(catalog, target, settings))


def _hub(target: Target, key: str, locked: LockedModel, source: Source | None, settings: Settings) -> Hub:
    """The source to fetch from: the one given, else the catalog's that the lock was made from."""
    sources = dict(target.models)[key].sources
    chosen = source or next((one for one in sources if one.label == locked.source), sources[0])
    commit = locked.commit if chosen.label == locked.source else None
    return open_hub(
        chosen, relative_to=Path(settings.catalog).parent, commit=commit, parallel=settings.parallel
    )


def _base(text: str | None, catalog: Catalog) -> tuple[str | None, Reference | None]:
    """A base by its name in the catalog, or any image by reference."""
    if text is None or text in catalog.bases:
        return text, None
    return None, parse_typed(text)


def _summary(result: Built | Planned) -> str:
    if isinstance(result, Planned):
        rows = [f"  {human_size(layer.size):>9}  {layer.title}" for layer in result.layers]
        what = f"{len(result.layers)} layers, {human_size(result.size)}"
        head = f"{result.key}: {what}, would go to {result.destination}"
        if result.dockerfile:
            return result.dockerfile.rstrip()
        return "\n".join([head, *rows])
    several = result.images if len(result.images) > 1 else ()
    rows = [f"\n    {one.platform:<12}  {one.name}  {one.digest}" for one in several]
    return (
        f"{result.key}: {result.destination}\n"
        f"  digest    {result.digest}\n"
        f"  base      {result.base} ({result.platform})\n"
        f"  layers    {result.layers}, {human_size(result.size)}\n"
        f"  sent      {result.layers_sent} layers, {human_size(result.sent)}\n"
        f"  command   {result.command}\n"
        f"  took      {result.seconds:.1f} s" + "".join(rows)
    )
