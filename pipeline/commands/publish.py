"""`duopack publish`: a built image, copied to where people pull it."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from pipeline.catalog.load import load_catalog
from pipeline.catalog.schema import Catalog
from pipeline.catalog.target import Target, build_keys, find_target
from pipeline.commands.common import destination_of, settings_of, showing
from pipeline.errors import DuopackError, UsageError, quoted
from pipeline.files import human_size
from pipeline.lock.values import read_lock
from pipeline.oci.digest import Digest
from pipeline.oci.reference import Reference, parse_reference, parse_typed
from pipeline.reports.output import print_json, print_text
from pipeline.settings import Settings
from pipeline.stages.base import base_names, refuse_base_as_destination
from pipeline.stages.publish import Expected, publish, under_registry


def run(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    catalog = load_catalog(settings.catalog)
    source, destination, expected = _places(options, catalog, settings)
    refuse_base_as_destination(destination, base_names(catalog, settings.catalog.parent, None))
    with showing(options) as progress:
        whole = options.platform is None
        done = publish(source, destination, settings, progress, expected, whole=whole)
    if options.json:
        print_json(asdict(done))
    else:
        print_text(
            f"{done.destination}\n  digest    {done.digest}\n"
            f"  sent      {done.layers_sent} layers, {human_size(done.sent)}"
        )
    return 0


def _places(
    options: argparse.Namespace, catalog: Catalog, settings: Settings
) -> tuple[Reference, Reference, Expected | None]:
    """Source and destination: from a key they follow the catalog, an image needs --to."""
    if options.image not in {row.key for row in build_keys(catalog)}:
        if not options.to or options.from_registry:
            raise UsageError(
                f"'{quoted(options.image)}' is not a key of the catalog, so the names do not follow from it",
                mend="give a key ('duopack list'), or an image with --to DEST and without --from-registry",
            )
        return parse_typed(options.image), parse_typed(options.to), None
    target = find_target(catalog, options.image, base=options.base, platform=options.platform)
    destination = parse_typed(options.to or destination_of(catalog, target, settings))
    source = parse_reference(f"oci:{settings.work}/{target.key}")
    if options.from_registry:
        source = under_registry(destination, options.from_registry)
    elif destination.transport == "oci" and not options.to:
        raise UsageError(
            "there is no registry to publish to",
            mend="set DUOPACK_REGISTRY=registry.example/namespace, or publish.repository in models.yaml, or give --to",
        )
    # A name that follows from the catalog tells the base; one that was given says what its giver knows.
    bases = None if options.to else _locked_bases(target, settings)
    return source, destination, Expected(target, bases)


def _locked_bases(target: Target, settings: Settings) -> dict[str, Digest]:
    """The base's digests that models.lock has. Raises DuopackError when it has none."""
    base = read_lock(settings.lock).bases.get(target.base_key)
    if base is None or target.platform not in base.platforms:
        raise DuopackError(
            f"it does not say which image the base '{target.base_key}' is for {target.platform}",
            where=str(settings.lock),
            mend=f"take the models.lock that the image was built with, or run 'duopack build {target.key}' first",
        )
    return base.platforms
