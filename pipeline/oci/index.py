"""One image for several platforms: an OCI index over manifests (image-spec 1.1, image-index.md).

A registry and a layout hold the index under one name and the images below it by digest. An archive for
`docker load` and a classic engine know one platform a name: there each image has the architecture behind its tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pipeline.oci.archive import ArchiveSink, manifest_descriptor
from pipeline.oci.digest import Digest
from pipeline.oci.documents import canonical
from pipeline.oci.model import OCI_INDEX, Blob, Descriptor, OnBytes, Sink
from pipeline.oci.places import open_sink
from pipeline.oci.reference import DEFAULT_TAG, Reference

if TYPE_CHECKING:
    from pipeline.oci.registry.sink import Holders


class Family(Protocol):
    """A place that takes an image for each of several platforms, one after the other."""

    def member(self, platform: str) -> Sink:
        """Where the image for a platform goes."""
        ...

    def finish(self, members: Sequence[Descriptor], index: bytes | None = None) -> Descriptor | None:
        """Makes them visible together; the index's descriptor, where the place can hold one.

        `index` is the index as it was elsewhere; absent, one is made.
        """
        ...

    def abort(self) -> None:
        """Gives up what is half-written."""
        ...

    def name_of(self, platform: str) -> str:
        """What a person pulls or runs to get the image for a platform."""
        ...


def open_family(
    reference: Reference,
    *,
    mount_from: tuple[str, ...] = (),
    holders: Holders | None = None,
    journal: Path | None = None,
) -> Family:
    """The place under a reference, for several platforms; the other arguments are those of `open_sink`."""
    if reference.transport in {"docker", "oci"}:
        return IndexFamily(reference, mount_from, holders, journal)
    if reference.transport == "docker-archive":
        return ArchiveFamily(reference, ArchiveSink(reference.path, ""))
    return EngineFamily(reference)


def make_index(members: Sequence[Descriptor]) -> bytes:
    """An index over images, each with its platform, in the given order."""
    return canonical(
        {
            "schemaVersion": 2,
            "mediaType": OCI_INDEX,
            "manifests": [replace(member, annotations={}).to_json() for member in members],
        }
    )


def of_platform(reference: Reference, platform: str) -> Reference:
    """The name of one platform's image where an index cannot be: `:v1` becomes `:v1-arm64`."""
    if not reference.repository:
        return reference
    return reference.with_tag(
        f"{reference.tag or DEFAULT_TAG}-{platform.partition('/')[2].replace('/', '-')}"
    )


@dataclass(frozen=True)
class IndexFamily:
    """A registry's repository or a layout: images by digest, then the index under the name."""

    reference: Reference
    mount_from: tuple[str, ...]
    holders: Holders | None
    journal: Path | None

    def member(self, platform: str) -> Sink:  # noqa: ARG002
        return open_sink(
            self.reference,
            mount_from=self.mount_from,
            holders=self.holders,
            journal=self.journal,
            by_digest=True,
        )

    def finish(self, members: Sequence[Descriptor], index: bytes | None = None) -> Descriptor:
        sink = open_sink(self.reference)
        assert isinstance(sink, IndexSink)
        return sink.put_index(index or make_index(members))

    def abort(self) -> None:
        """Images without a name stay, as blobs do: the next run needs them."""

    def name_of(self, platform: str) -> str:  # noqa: ARG002
        return str(self.reference)


@runtime_checkable
class IndexSink(Sink, Protocol):
    """A place that holds indexes too."""

    def put_index(self, index: bytes) -> Descriptor: ...


@dataclass(frozen=True)
class ArchiveFamily:
    """One archive with an image for each platform; a layer that several have is there once."""

    reference: Reference
    archive: ArchiveSink

    def member(self, platform: str) -> Sink:
        return _ArchiveMember(self.archive, self.name_of(platform))

    def finish(self, members: Sequence[Descriptor], index: bytes | None = None) -> None:  # noqa: ARG002
        self.archive.finish()

    def abort(self) -> None:
        self.archive.abort()

    def name_of(self, platform: str) -> str:
        return of_platform(self.reference, platform).name_tag


@dataclass(frozen=True)
class EngineFamily:
    """A local engine: its classic store has one platform under a name."""

    reference: Reference

    def member(self, platform: str) -> Sink:
        return open_sink(of_platform(self.reference, platform))

    def finish(self, members: Sequence[Descriptor], index: bytes | None = None) -> None:
        """Each image is there since it was written."""

    def abort(self) -> None:
        """Images that are loaded stay under their own names."""

    def name_of(self, platform: str) -> str:
        return of_platform(self.reference, platform).name_tag


@dataclass
class _ArchiveMember:
    """One of several images of an archive, which goes on after it."""

    archive: ArchiveSink
    name_tag: str
    parallel: int = field(default=1, init=False)

    def has(self, digest: Digest, size: int) -> bool:
        return self.archive.has(digest, size)

    def put_blob(self, blob: Blob, on_bytes: OnBytes) -> Digest:
        return self.archive.put_blob(blob, on_bytes)

    def put_manifest(self, manifest: bytes, config: bytes, layers: tuple[Descriptor, ...]) -> Descriptor:
        self.archive.add_image(self.name_tag, config, layers)
        return manifest_descriptor(manifest)

    def abort(self) -> None:
        self.archive.abort()
