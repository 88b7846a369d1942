"""One target for several platforms: an image for each on its own base, the same weight layers once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.catalog.schema import Catalog
from pipeline.catalog.target import Target
from pipeline.lock.values import Lock
from pipeline.oci.index import open_family
from pipeline.oci.reference import Reference
from pipeline.reports.progress import Progress
from pipeline.settings import Settings
from pipeline.stages.base import mountable
from pipeline.stages.build import Built, built_of, prepare, send
from pipeline.stages.sisters import catalog_sisters

if TYPE_CHECKING:
    from pipeline.hubs.hub import Hub


def build_platforms(
    targets: Sequence[Target],
    catalog: Catalog,
    lock: Lock,
    settings: Settings,
    destination: Reference,
    hubs: Mapping[str, Hub],
    progress: Progress,
    base_override: Reference | None = None,
) -> Built:
    """Builds one target for the platform of each of `targets`, which differ in nothing else.

    Every platform is looked at before anything is fetched, and the name is given when all images are there. An archive
    and an engine get a name for each instead (see oci/index.py). Raises as `build` does.
    """
    started = time.monotonic()
    all_parts = [prepare(target, catalog, lock, settings, destination, base_override) for target in targets]
    sisters = catalog_sisters(catalog, targets[0], destination, settings)
    family = open_family(
        destination,
        mount_from=mountable(all_parts[0].base.reference, destination),
        holders=sisters,
        journal=settings.upload_journal,
    )
    sent, members = [], []
    try:
        for parts in all_parts:
            platform = parts.target.platform
            progress.note(f"{parts.target.key} for {platform}")
            sink = family.member(platform)
            one, descriptor = send(parts, hubs, sink, sisters, progress, family.name_of(platform))
            sent.append(one)
            members.append(replace(descriptor, platform=platform))
        index = family.finish(members)
    except BaseException:
        family.abort()
        raise
    return built_of(all_parts[0], started, index.digest if index else sent[0].digest, sent)
