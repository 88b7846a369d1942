"""The whole way for one locked target: base, download, launch files, image, send.

Everything that can refuse does so before the first weight is fetched: rules, base, destination.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.catalog.schema import Catalog, Model
from pipeline.catalog.target import Target
from pipeline.errors import DuopackError
from pipeline.files import exclusive, require_space, require_writable, same_disk
from pipeline.lock.values import Lock, LockedModel
from pipeline.oci.digest import Digest
from pipeline.oci.hashing import BrokenPromiseError, FileContent
from pipeline.oci.image import Image, Layer
from pipeline.oci.model import Descriptor, Sink
from pipeline.oci.places import open_sink
from pipeline.oci.reference import Reference
from pipeline.oci.tar import TarEntry, TarLayer, pack
from pipeline.oci.transfer import missing_layers, write_image
from pipeline.reports.progress import Progress
from pipeline.settings import Settings
from pipeline.stages.base import (
    OpenBase,
    base_names,
    described_base,
    mountable,
    open_base,
    refuse_base_as_destination,
)
from pipeline.stages.download import Framed, download
from pipeline.stages.image import LayerMemo, downloaded_entries, file_layers, locked_entries, plan_image
from pipeline.stages.launch import LaunchFiles, launch_files
from pipeline.stages.sending import Sending
from pipeline.stages.sisters import Sisters, catalog_sisters, hash_promising

if TYPE_CHECKING:
    from pipeline.hubs.hub import Hub


@dataclass(frozen=True)
class BuiltImage:
    """The image for one platform; `name` is what it is pulled or loaded by."""

    platform: str
    name: str
    digest: str


@dataclass(frozen=True)
class Built:
    """What a build made. Sizes are in bytes; `sent` counts what went over the wire or onto the disk.

    Of several platforms the digest is the index's, where the destination holds one, and `size` and `layers` are the
    first one's.
    """

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
    images: tuple[BuiltImage, ...] = ()


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
    dockerfile: str | None = None
    """What docker would be given, when it is to build."""


@dataclass(frozen=True)
class Parts:
    """What every way to build has in common: all that can be refused has been looked at."""

    target: Target
    lock: Lock
    settings: Settings
    destination: Reference
    base: OpenBase
    launch: LaunchFiles

    def image(self, entries: Mapping[str, Sequence[TarEntry]]) -> Image:
        return plan_image(self.target, self.base.image, entries, self.launch)

    def locked_entries(self, key: str) -> tuple[TarEntry, ...]:
        model = dict(self.target.models)[key]
        return locked_entries(model, self.lock.models[key], self.settings.model_directory(key))


def prepare(
    target: Target,
    catalog: Catalog,
    lock: Lock,
    settings: Settings,
    destination: Reference,
    override: Reference | None,
) -> Parts:
    """Opens the base and makes the launch files. Raises DuopackError for what a rule or the base forbids."""
    refuse_base_as_destination(destination, base_names(catalog, settings.catalog.parent, override))
    base = open_base(target, lock, settings, override)
    built_on = target.base if override is None else described_base(target.base, override)
    launch = launch_files(dict(target.models), built_on, base.digest, target.script)
    return Parts(target, lock, settings, destination, base, launch)


def require_destination(parts: Parts) -> None:
    """Asks a registry for something: one that is down, or wants a login, raises DuopackError now."""
    if parts.destination.transport == "docker":
        open_sink(parts.destination).has(Digest.of(b""), 0)


def plan(
    target: Target,
    catalog: Catalog,
    lock: Lock,
    settings: Settings,
    destination: Reference,
    base_override: Reference | None = None,
) -> Planned:
    """What `build` would make of a locked target."""
    parts = prepare(target, catalog, lock, settings, destination, base_override)
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
    parts = prepare(target, catalog, lock, settings, destination, base_override)
    sisters = catalog_sisters(catalog, target, destination, settings)
    sink = open_sink(
        destination,
        mount_from=mountable(parts.base.reference, destination),
        holders=sisters,
        journal=settings.upload_journal,
    )
    sent, _ = send(parts, hubs, sink, sisters, progress)
    return built_of(parts, started, sent.digest, (sent,))


@dataclass(frozen=True)
class Sent:
    """An image that is at its destination; `name` is what it is pulled by. Sizes are in bytes."""

    platform: str
    name: str
    digest: str
    size: int
    layers: int
    layers_sent: int
    sent: int


def send(
    parts: Parts, hubs: Mapping[str, Hub], sink: Sink, sisters: Sisters, progress: Progress, name: str = ""
) -> tuple[Sent, Descriptor]:
    """Downloads what the sink does not have and writes the image, each weight read once."""
    settings, destination = parts.settings, parts.destination
    sending = Sending(progress, sink)
    memo = LayerMemo(settings.layer_memo)
    known = memo.known()
    entries = {key: parts.locked_entries(key) for key, _ in parts.target.models}
    image = parts.image(entries)
    for warning in (*parts.launch.warnings, *image.warnings):
        progress.warn(warning)
    is_file = destination.transport in {"oci", "docker-archive"}
    # The base's layers matter only for the space; a registry is not asked for each of them twice.
    asked = image.layers if is_file else image.layers[len(parts.base.image.layers) :]
    missing = missing_layers(image, asked, sink, known)
    needed = _to_download(entries, missing, progress)
    if is_file:
        _require_space(destination, missing, [entry for key in needed for entry in entries[key]])

    def learn(key: str, digest: Digest) -> None:
        known[key] = digest
        memo.remember(key, digest)

    # Only a registry is sent bytes by a digest that is known; the other sinks hash what they write in any case.
    with fetched(
        parts, needed, hubs, progress, learn if destination.transport == "docker" else None
    ) as found:
        image = parts.image({**entries, **found})
        hash_promising(image, known, sisters, memo, progress)
        try:
            descriptor = write_image(
                image,
                sink,
                parallel=settings.parallel,
                known=known,
                on_layer=sending,
                remember=memo.remember,
            )
        except BrokenPromiseError:
            # Else a damaged memo would promise the same again at each attempt.
            memo.forget()
            raise
    sent = Sent(
        platform=parts.target.platform,
        name=name or str(destination),
        digest=descriptor.digest,
        size=image.size,
        layers=len(image.layers),
        layers_sent=sending.layers,
        sent=sending.bytes,
    )
    return sent, descriptor


@contextmanager
def fetched(
    parts: Parts,
    keys: Sequence[str],
    hubs: Mapping[str, Hub],
    progress: Progress,
    learn: Callable[[str, Digest], None] | None = None,
) -> Iterator[dict[str, tuple[TarEntry, ...]]]:
    """The files of models, downloaded and checked, by model key; nobody else changes them during the block.

    `learn` is told, from any thread, the key and the digest of each layer that is a file that had to be checked.
    """
    settings, models = parts.settings, dict(parts.target.models)
    with ExitStack() as stack:
        # In one order for everybody: two builds that share models must not wait for each other.
        for key in sorted(keys):
            stack.enter_context(
                exclusive(settings.model_directory(key).with_name(f"{key}.lock"), progress.note)
            )
        found = {}
        for key in keys:
            directory = settings.model_directory(key)
            framed = _framed(models[key], parts.lock.models[key], directory, learn) if learn else None
            weights = download(
                key, models[key], parts.lock.models[key], hubs[key], directory, progress, framed
            )
            found[key] = downloaded_entries(models[key], weights)
        yield found


def _framed(
    model: Model, locked: LockedModel, directory: Path, learn: Callable[[str, Digest], None]
) -> dict[str, Framed]:
    def tell(key: str, sha256: str) -> None:
        learn(key, Digest(f"sha256:{sha256}"))

    return {
        path: Framed(*frame, partial(tell, layer.key))
        for path, layer, frame in file_layers(model, locked, directory)
    }


def built_of(parts: Parts, started: float, digest: str, sent: Sequence[Sent]) -> Built:
    """What was made, of one platform or several; `started` is a time of the monotonic clock."""
    return Built(
        key=parts.target.key,
        destination=str(parts.destination),
        digest=digest,
        base=str(parts.base.pinned),
        platform=",".join(one.platform for one in sent),
        size=sent[0].size,
        layers=sent[0].layers,
        layers_sent=sum(one.layers_sent for one in sent),
        sent=sum(one.sent for one in sent),
        seconds=round(time.monotonic() - started, 3),
        models=tuple(model.title for _, model in parts.target.models),
        command=parts.launch.command[-1],
        images=tuple(BuiltImage(one.platform, one.name, one.digest) for one in sent),
    )


def _require_space(destination: Reference, missing: Sequence[Layer], files: Sequence[TarEntry]) -> None:
    """Finds before the download what cannot be written: no such place, no permission, a disk that is too small.

    The disk has to hold the layers, and the files if they share it.
    """
    path = destination.path.absolute()
    directory = path if destination.transport == "oci" else path.parent
    if directory is not path and path.is_dir():
        raise DuopackError("this is a directory", where=str(path), mend="name a file")
    require_writable(directory)
    size = sum(layer.blob.size for layer in missing)
    contents = [entry.content for entry in files if isinstance(entry.content, FileContent)]
    absent = [content for content in contents if not content.path.exists()]
    if absent and same_disk(directory, absent[0].path):
        size += sum(content.size for content in absent)
    require_space(directory, size, purpose=f"writing {destination}")


def _to_download(
    entries: Mapping[str, Sequence[TarEntry]], missing: Sequence[Layer], progress: Progress
) -> tuple[str, ...]:
    """The models of which something must be read; a model that is on the disk is looked at in any case."""
    unread = {layer.blob.key for layer in missing if isinstance(layer.blob, TarLayer)}
    needed = []
    for key, files in entries.items():
        if unread.isdisjoint(layer.key for layer in pack(files)) and not all(map(_is_on_disk, files)):
            progress.note(f"{key}: every layer is at the destination already: nothing is downloaded")
        else:
            needed.append(key)
    return tuple(needed)


def _is_on_disk(entry: TarEntry) -> bool:
    return isinstance(entry.content, bytes) or entry.content.path.exists()
