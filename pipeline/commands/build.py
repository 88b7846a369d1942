"""`duopack build`: from a key of the catalog to an image where it shall be."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from pipeline.catalog.load import load_catalog
from pipeline.catalog.schema import Catalog, Source
from pipeline.catalog.target import Target, targets
from pipeline.commands.common import destination_of, settings_of, showing
from pipeline.errors import UsageError
from pipeline.files import human_size
from pipeline.hubs import open_hub
from pipeline.hubs.hub import Hub
from pipeline.lock.values import LockedModel
from pipeline.oci.reference import Reference, parse_reference
from pipeline.reports.output import print_json, print_text
from pipeline.reports.progress import Progress
from pipeline.settings import Settings
from pipeline.stages.build import Built, Planned, build, plan
from pipeline.stages.locking import ensure_locked, parse_source


def run(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    catalog = load_catalog(settings.catalog)
    base_name, base_image = _base(options.base, catalog)
    chosen = targets(catalog, tuple(options.keys), base=base_name, platform=options.platform)
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
    results: list[Built | Planned] = []
    with showing(options) as progress:
        for target in chosen:
            destination = parse_reference(options.to or destination_of(catalog, target, settings))
            results.append(
                _one(options, catalog, target, settings, destination, source, base_image, progress)
            )
            if not options.json:
                print_text(_summary(results[-1]))
    if options.json:
        print_json([asdict(result) for result in results])
    return 0


def _one(
    options: argparse.Namespace,
    catalog: Catalog,
    target: Target,
    settings: Settings,
    destination: Reference,
    source: Source | None,
    base_image: Reference | None,
    progress: Progress,
) -> Built | Planned:
    lock = ensure_locked(
        target, settings, progress, locked=options.locked, source=source, needs_base=base_image is None
    )
    if options.dry_run:
        return plan(target, catalog, lock, settings, destination, base_image)
    hubs = {key: _hub(target, key, lock.models[key], source, settings) for key, _ in target.models}
    return build(target, catalog, lock, settings, destination, hubs, progress, base_image)


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
    return None, parse_reference(text)


def _summary(result: Built | Planned) -> str:
    if isinstance(result, Planned):
        rows = [f"  {human_size(layer.size):>9}  {layer.title}" for layer in result.layers]
        what = f"{len(result.layers)} layers, {human_size(result.size)}"
        head = f"{result.key}: {what}, would go to {result.destination}"
        return "\n".join([head, *rows])
    return (
        f"{result.key}: {result.destination}\n"
        f"  digest    {result.digest}\n"
        f"  base      {result.base} ({result.platform})\n"
        f"  layers    {result.layers}, {human_size(result.size)}\n"
        f"  sent      {result.layers_sent} layers, {human_size(result.sent)}\n"
        f"  command   {result.command}\n"
        f"  took      {result.seconds:.1f} s"
    )
