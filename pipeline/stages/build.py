"""The whole way for one locked target: base, download, launch files, image, send.

Everything that can refuse does so before the first weight is fetched: rules, base, destination.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.catalog.schema import Catalog
from pipeline.catalog.target import Target
from pipeline.files import exclusive
from pipeline.lock.values import Lock
from pipeline.oci.digest import Digest
from pipeline.oci.image import Image
from pipeline.oci.model import Sink
from pipeline.oci.places import open_sink
from pipeline.oci.reference import Reference
from pipeline.oci.tar import TarEntry, TarLayer, pack
from pipeline.oci.transfer import write_image
from pipeline.reports.progress import Progress
from pipeline.settings import Settings
from pipeline.stages.base import OpenBase, base_names, mountable, open_base, refuse_base_as_destination
from pipeline.stages.download import download
from pipeline.stages.image import LayerMemo, downloaded_entries, locked_entries, plan_image
from pipeline.stages.launch import LaunchFiles, launch_files
from pipeline.stages.sending import Sending

if TYPE_CHECKING:
    from pipeline.hubs.hub import Hub

_NOWHERE = Digest.of(b"no blob has this content: duopack asks for it to see whether a destination answers")


@dataclass(frozen=True)
class Built:
    """What a build made. Sizes are in bytes; `sent` counts what went over the wire or onto the disk."""

    key: str
    destination: str
    digest: str
    base: str
    platform: str
    size: int
    layers: int
    layers_sent: int
    sent: int
    seconds: float
    models: tuple[str, ...]
    command: str


@dataclass(frozen=True)
class PlannedLayer:
    """A layer as it would be; size in bytes."""

    title: str
    size: int


@dataclass(frozen=True)
class Planned:
    """What a build would make, without weights read or anything sent."""

    key: str
    destination: str
    base: str
    platform: str
    size: int
    layers: tuple[PlannedLayer, ...]
    command: str
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Parts:
    """What a build and a plan have in common."""

    target: Target
    lock: Lock
    settings: Settings
    base: OpenBase
    launch: LaunchFiles

    def image(self, entries: Mapping[str, Sequence[TarEntry]]) -> Image:
        return plan_image(self.target, self.base.image, entries, self.launch)

    def locked_entries(self, key: str) -> tuple[TarEntry, ...]:
        model = dict(self.target.models)[key]
        return locked_entries(model, self.lock.models[key], self.settings.model_directory(key))


def _prepare(
    target: Target,
    catalog: Catalog,
    lock: Lock,
    settings: Settings,
    destination: Reference,
    override: Reference | None,
) -> _Parts:
    refuse_base_as_destination(destination, base_names(catalog, settings.catalog.parent, override))
    base = open_base(target, lock, settings, override)
    launch = launch_files(dict(target.models), target.base, base.digest, target.profile_name)
    return _Parts(target, lock, settings, base, launch)


def plan(
    target: Target,
    catalog: Catalog,
    lock: Lock,
    settings: Settings,
    destination: Reference,
    base_override: Reference | None = None,
) -> Planned:
    """What `build` would make of a locked target."""
    parts = _prepare(target, catalog, lock, settings, destination, base_override)
    image = parts.image({key: parts.locked_entries(key) for key, _ in target.models})
    return Planned(
        key=target.key,
        destination=str(destination),
        base=str(parts.base.pinned),
        platform=target.platform,
        size=image.size,
        layers=tuple(PlannedLayer(layer.title, layer.blob.size) for layer in image.layers),
        command=parts.launch.command[-1],
        warnings=(*parts.launch.warnings, *image.warnings),
    )


def build(
    target: Target,
    catalog: Catalog,
    lock: Lock,
    settings: Settings,
    destination: Reference,
    hubs: Mapping[str, Hub],
    progress: Progress,
    base_override: Reference | None = None,
) -> Built:
    """Builds a target whose models and base are locked, and sends it; `hubs` gives each model's source by key."""
    started = time.monotonic()
    parts = _prepare(target, catalog, lock, settings, destination, base_override)
    sink = open_sink(
        destination, mount_from=mountable(parts.base.reference, destination), journal=settings.upload_journal
    )
    sending = Sending(progress)
    memo = LayerMemo(settings.layer_memo)
    known = memo.known()
    entries = {}
    with ExitStack() as stack:
        for key, model in target.models:
            locked = parts.locked_entries(key)
            # Asks the destination now: a registry that is down or wants a login is found before the download.
            missing = [layer for layer in pack(locked) if not _is_there(layer, known, sink)]
            if not missing and not all(_on_disk(entry) for entry in locked):
                progress.note(f"{key}: every layer is at the destination already: nothing is downloaded")
                entries[key] = locked
                continue
            directory = settings.model_directory(key)
            stack.enter_context(exclusive(directory.with_name(f"{key}.lock"), progress.note))
            weights = download(key, model, lock.models[key], hubs[key], directory, progress)
            entries[key] = downloaded_entries(model, weights)
        image = parts.image(entries)
        for warning in (*parts.launch.warnings, *image.warnings):
            progress.warn(warning)
        descriptor = write_image(
            image, sink, parallel=settings.parallel, known=known, on_layer=sending, remember=memo.remember
        )
    return Built(
        key=target.key,
        destination=str(destination),
        digest=descriptor.digest,
        base=str(parts.base.pinned),
        platform=target.platform,
        size=image.size,
        layers=len(image.layers),
        layers_sent=sending.layers,
        sent=sending.bytes,
        seconds=round(time.monotonic() - started, 3),
        models=tuple(model.title for _, model in target.models),
        command=parts.launch.command[-1],
    )


def _is_there(layer: TarLayer, known: Mapping[str, Digest], sink: Sink) -> bool:
    # An unknown digest cannot be there; asking for it all the same proves that the destination answers.
    digest = known.get(layer.key)
    return sink.has(digest or _NOWHERE, layer.size) and digest is not None


def _on_disk(entry: TarEntry) -> bool:
    return isinstance(entry.content, bytes) or entry.content.path.exists()
