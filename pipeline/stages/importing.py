"""What an export brought, into a registry, an engine or a layout: every byte checked against its digest.

Nothing is joined or unpacked on the disk. What the destination has is not read, so a second run goes on where the
first one ended; an image becomes visible when all of it is there.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import DuopackError, UsageError, quoted
from pipeline.files import human_size
from pipeline.oci.archive_source import ArchiveSource
from pipeline.oci.bundle import Chosen, choose_image
from pipeline.oci.bundle_source import BundleSource, open_parts
from pipeline.oci.digest import Digest
from pipeline.oci.documents import parse_object
from pipeline.oci.layout import IMAGE_NAME, REF_NAME, LayoutBlob, LayoutSource
from pipeline.oci.model import MAX_CONFIG, Blob, Described, Descriptor, Sink, Source
from pipeline.oci.places import open_sink
from pipeline.oci.reference import Reference, parse_reference
from pipeline.oci.split import Parts
from pipeline.oci.transfer import PlanningSink, copy_image
from pipeline.reports.progress import Progress
from pipeline.settings import Settings
from pipeline.stages.export import STEM
from pipeline.stages.sending import Sending
from pipeline.stages.sisters import among

_MAX_SUMS = 1 << 20


@dataclass(frozen=True)
class Offered:
    """An image of an export: by what to ask the source for it, and the name that it was given, if any."""

    wanted: str
    name: Reference | None
    tag: str


@dataclass(frozen=True)
class Imported:
    """An image at its destination; `sent` counts the bytes that moved."""

    name: str
    destination: str
    digest: str
    layers_sent: int
    sent: int
    seconds: float


def open_export(path: Path) -> tuple[Source, tuple[Offered, ...]]:
    """What an archive, a directory with parts or a layout holds. Raises DuopackError when it is none of them."""
    if path.is_dir() and (path / "oci-layout").exists():
        layout = LayoutSource(path)
        return layout, tuple(map(_offered, layout.entries()))
    if path.is_dir():
        parts = open_parts(path, STEM)
        if parts is None:
            raise DuopackError(
                f"there is neither an OCI layout nor a part of an export ({STEM}.001) in it",
                where=str(path),
                mend="name the directory or file that 'duopack export' made",
            )
        _check_listed(path, parts)
        bundle = BundleSource(parts)
        return bundle, tuple(map(_offered, bundle.entries()))
    if not path.is_file():
        raise UsageError("there is no such file or directory", where=str(path), mend="check the name")
    bundle = BundleSource(Parts((path,)))
    if bundle.is_bundle:
        return bundle, tuple(map(_offered, bundle.entries()))
    return _open_archive(path)


def destinations(
    offered: Sequence[Offered], to: Reference | None, under: str | None
) -> tuple[tuple[Offered, Reference], ...]:
    """Where each image goes: `to` names one image or a layout; `under` is a registry with a namespace.

    With neither it is the local engine, under the names in the export. Raises UsageError when a name is missing
    or two images would get one.
    """
    pairs = tuple((one, _destination(one, len(offered), to, under)) for one in offered)
    names = [str(place) for _, place in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(
            "two images would go there", where=twice[0], mend="import them one by one: --image NAME --to DEST"
        )
    return pairs


def bring(
    source: Source,
    offered: Offered,
    destination: Reference,
    have: Sequence[Reference],
    settings: Settings,
    progress: Progress,
    *,
    platform: str | None = None,
) -> Imported:
    """Copies one image; `have` are images of the destination's registry whose layers may be mounted.

    Raises DuopackError that names the layers which are neither in the export nor at the destination.
    """
    started = time.monotonic()
    name = offered.name
    sink = open_sink(
        destination,
        holders=among(have, destination),
        journal=settings.upload_journal,
        name=f"{name.registry}/{name.repository}:{name.tag}" if name else "",
    )
    image = choose_image(source, offered.wanted, platform, name or destination)
    _require_all(image, destination, sink)
    sending = Sending(progress, sink)
    descriptor = copy_image(
        _Lazy(source), str(image.digest), None, sink, parallel=settings.parallel, on_layer=sending
    )
    return Imported(
        name=name.name_tag if name else offered.tag,
        destination=str(destination),
        digest=descriptor.digest,
        layers_sent=sending.layers,
        sent=sending.bytes,
        seconds=round(time.monotonic() - started, 3),
    )


@dataclass(frozen=True)
class _LazyBlob(Described):
    """A blob that is looked for when it is read: one that was left out may be at the destination already."""

    source: Source
    descriptor: Descriptor

    def read(self, offset: int = 0) -> Iterator[bytes | memoryview]:
        return self.source.blob(self.descriptor).read(offset)


@dataclass(frozen=True)
class _Lazy:
    """An export whose blobs are looked for when they are read."""

    source: Source

    def manifest(self, reference: str) -> tuple[Descriptor, bytes]:
        return self.source.manifest(reference)

    def blob(self, descriptor: Descriptor) -> Blob:
        return _LazyBlob(self.source, descriptor)


def _require_all(image: Chosen, destination: Reference, sink: Sink) -> None:
    """Finds what was left out and is not at the destination, before anything is sent."""
    absent = [layer for layer in image.layers if not _carries(image.source, layer)]
    if not absent:
        return
    if isinstance(sink, PlanningSink):
        plan = zip(image.layers, image.diff_ids, strict=True)
        sink.plan([(layer.digest, Digest(diff_id)) for layer, diff_id in plan])
    missing = [layer for layer in absent if not sink.has(layer.digest, layer.size)]
    if not missing:
        return
    shown = ", ".join(layer.digest for layer in missing[:5])
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    base = _base_name(image)
    raise DuopackError(
        f"of {image.name.name_tag}, {len(missing)} of {len(image.layers)} layers "
        f"({human_size(sum(layer.size for layer in missing))}) are neither in the export nor there: {shown}{more}"
        + (f"; it is built on {base}" if base and image.layers[0] in missing else ""),
        where=str(destination),
        mend="bring the image here first whose layers were left out (name it with --have if it is in another "
        "repository of the registry), or export again without --since",
    )


def _carries(source: Source, layer: Descriptor) -> bool:
    try:
        blob = source.blob(layer)
    except DuopackError:
        return False
    return not isinstance(blob, LayoutBlob) or blob.path.is_file()


def _base_name(image: Chosen) -> str:
    settings = parse_object(image.config, where="config", limit=MAX_CONFIG).get("config")
    labels = settings.get("Labels") if isinstance(settings, dict) else None
    name = labels.get("org.opencontainers.image.base.name") if isinstance(labels, dict) else None
    return quoted(name) if isinstance(name, str) else ""


def _offered(entry: Descriptor) -> Offered:
    """An image as index.json lists it; a name that is none is not believed."""
    full = entry.annotations.get(IMAGE_NAME, "")
    tag = entry.annotations.get(REF_NAME, "")
    try:
        name = parse_reference(f"docker://{full}") if full else None
    except UsageError:
        name = None
    return Offered(str(entry.digest), name if name and name.tag else None, quoted(tag, 128))


def _open_archive(path: Path) -> tuple[Source, tuple[Offered, ...]]:
    """An archive of another tool, which has no layout inside."""
    source = ArchiveSource(path)
    offered = [Offered(name, parse_reference(f"docker://{name}"), name) for name in source.names() if name]
    return source, tuple(offered) or (Offered("", None, ""),)


def _check_listed(path: Path, parts: Parts) -> None:
    """The last parts may be missing without a gap: SHA256SUMS names all."""
    try:
        listed = (path / "SHA256SUMS").read_text(encoding="ascii", errors="replace")[:_MAX_SUMS]
    except OSError:
        return
    names = set(re.findall(rf"^[0-9a-f]{{64}}  ({re.escape(STEM)}\.[0-9]{{3}})$", listed, re.MULTILINE))
    missing = sorted(names - {one.name for one in parts.paths})
    if missing:
        raise DuopackError(f"the part {missing[0]} is missing", where=str(path), mend="copy all parts here")


def _destination(one: Offered, count: int, to: Reference | None, under: str | None) -> Reference:
    if to is not None and count == 1:
        return to
    if to is not None and to.transport == "oci" and to.tag is None and one.tag:
        return to.with_tag(one.tag)
    if to is not None:
        raise UsageError(
            f"{count} images cannot all go to {to}",
            where="--to",
            mend="choose one with --image NAME, or give --under HOST/NAMESPACE, or --to oci:DIR",
        )
    if one.name is None:
        raise UsageError(
            f"the image '{one.tag or one.wanted}' has no name in the export",
            mend="choose it with --image and say where it shall go with --to",
        )
    if under:
        last = one.name.repository.rpartition("/")[2]
        return parse_reference(f"docker://{under.rstrip('/')}/{last}:{one.name.tag}")
    return replace(one.name, transport="docker-daemon", digest=None)
