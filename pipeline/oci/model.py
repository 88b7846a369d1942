"""The nouns of this package: descriptor, blob, source and sink.

A blob may not know its digest before its bytes have been read: whoever moves it hashes it on the way
and is told the digest by the sink. Sources and sinks know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.oci.digest import Digest

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER_TAR = "application/vnd.oci.image.layer.v1.tar"
OCI_LAYER_GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
OCI_LAYER_ZSTD = "application/vnd.oci.image.layer.v1.tar+zstd"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER_TAR = "application/vnd.docker.image.rootfs.diff.tar"
DOCKER_LAYER_GZIP = "application/vnd.docker.image.rootfs.diff.tar.gzip"

# Manifests and configs are read whole: a bound against a hostile registry (distribution itself stops at 4 MiB).
MAX_MANIFEST = 4 << 20
MAX_CONFIG = 8 << 20

OnBytes = Callable[[int], None]
"""Told the number of bytes moved since the last call; negative when a failed attempt starts again."""


@dataclass(frozen=True)
class Descriptor:
    """A pointer to content (OCI image-spec, descriptor.md). `size` is in bytes."""

    media_type: str
    digest: Digest
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)
    platform: str | None = None

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"mediaType": self.media_type, "digest": str(self.digest), "size": self.size}
        if self.annotations:
            value["annotations"] = dict(sorted(self.annotations.items()))
        if self.platform:
            os_name, _, rest = self.platform.partition("/")
            arch, _, variant = rest.partition("/")
            value["platform"] = {"architecture": arch, "os": os_name} | (
                {"variant": variant} if variant else {}
            )
        return value


class Blob(Protocol):
    """Bytes that can be read from any offset, more than once, and always the same.

    `size` is exact and known before reading. `digest` is None until somebody has hashed the bytes.
    """

    @property
    def media_type(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def digest(self) -> Digest | None: ...

    def read(self, offset: int = 0) -> Iterator[bytes | memoryview]:
        """The bytes from `offset`; raises DuopackError when they cannot be had or are not what was promised."""
        ...


class Described:
    """What a blob is, where a descriptor tells it."""

    descriptor: Descriptor

    @property
    def media_type(self) -> str:
        return self.descriptor.media_type

    @property
    def size(self) -> int:
        return self.descriptor.size

    @property
    def digest(self) -> Digest:
        return self.descriptor.digest


class Source(Protocol):
    """A place that holds images: a registry repository, an OCI layout."""

    def manifest(self, reference: str) -> tuple[Descriptor, bytes]:
        """The manifest or index under a tag or a digest, checked against its digest when one is known."""
        ...

    def blob(self, descriptor: Descriptor) -> Blob:
        """A blob of the repository; its bytes are checked against the digest while they are read."""
        ...


class Sink(Protocol):
    """A place that takes one image: blobs in any order, then the manifest, last."""

    parallel: int
    """How many blobs it takes at once."""

    def has(self, digest: Digest, size: int) -> bool:
        """Whether the blob need not be sent at all."""
        ...

    def put_blob(self, blob: Blob, on_bytes: OnBytes) -> Digest:
        """Takes the bytes, hashing them on the way; checks them against `blob.digest` when that is known."""
        ...

    def put_manifest(self, manifest: bytes, config: bytes, layers: tuple[Descriptor, ...]) -> Descriptor:
        """Makes the image visible under its name, after every blob is known to be there; reads it back."""
        ...

    def abort(self) -> None:
        """Gives up: nothing half-written stays where a reader could take it for an image."""
        ...
