"""Images in memory: a source that holds anything, a sink that keeps what it is sent."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import DuopackError
from pipeline.oci.digest import Digest
from pipeline.oci.hashing import pour
from pipeline.oci.model import (
    OCI_CONFIG,
    OCI_LAYER_GZIP,
    OCI_LAYER_TAR,
    OCI_MANIFEST,
    Blob,
    Descriptor,
    OnBytes,
)
from pipeline.oci.tar import TarEntry, TarLayer


@dataclass(frozen=True)
class Bytes:
    """A blob in memory; `promised` is the digest it claims to have."""

    data: bytes
    media_type: str = OCI_LAYER_TAR
    promised: Digest | None = None

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def digest(self) -> Digest | None:
        return self.promised

    def read(self, offset: int = 0) -> Iterator[bytes]:
        for start in range(offset, len(self.data), 1 << 16):
            yield self.data[start : start + (1 << 16)]


@dataclass
class MemorySource:
    """Manifests by tag and digest, blobs by digest; nothing is checked: hostile content is welcome."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)

    def manifest(self, reference: str) -> tuple[Descriptor, bytes]:
        media_type, data = self.manifests[reference]
        return Descriptor(media_type, Digest.of(data), len(data)), data

    def blob(self, descriptor: Descriptor) -> Blob:
        return Bytes(self.blobs[descriptor.digest], descriptor.media_type, descriptor.digest)

    def add_blob(self, data: bytes, media_type: str) -> dict[str, Any]:
        digest = Digest.of(data)
        self.blobs[digest] = data
        return {"mediaType": media_type, "digest": str(digest), "size": len(data)}

    def add_manifest(self, value: Any, *tags: str, media_type: str = OCI_MANIFEST) -> dict[str, Any]:
        data = json.dumps(value, indent=3).encode()
        digest = str(Digest.of(data))
        for reference in (digest, *tags):
            self.manifests[reference] = (media_type, data)
        return {"mediaType": media_type, "digest": digest, "size": len(data)}


def base_config(diff_ids: list[str], **changes: Any) -> dict[str, Any]:
    """A config as a base image has it, with keys that this project does not know."""
    value: dict[str, Any] = {
        "architecture": "arm64",
        "os": "linux",
        "variant": "v8",
        "created": "2026-01-02T03:04:05.678Z",
        "author": "somebody",
        "x-unknown": {"kept": [1, 2.5, None]},
        "config": {
            "Entrypoint": ["/entry.sh"],
            "Cmd": ["bash"],
            "Env": ["PATH=/usr/bin:/bin", "ASCEND=/usr/local/Ascend", "EMPTY="],
            "Labels": {"base": "label"},
            "ExposedPorts": {"22/tcp": {}},
            "WorkingDir": "/workspace",
            "StopSignal": "SIGINT",
        },
        "history": [
            {"created": "2026-01-02T03:04:05Z", "created_by": "ADD rootfs"},
            {"created": "2026-01-02T03:04:05Z", "created_by": "ENV A=B", "empty_layer": True},
        ],
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }
    return value | changes


def base_layer(name: str = "etc/os-release", content: bytes = b"openEuler\n") -> tuple[bytes, str]:
    """A gzip layer and its diff id."""
    tar = b"".join(TarLayer((TarEntry(name, 0o644, content),)).read())
    return gzip.compress(tar, mtime=0), "sha256:" + hashlib.sha256(tar).hexdigest()


def small_base(source: MemorySource, *tags: str, **config_changes: Any) -> dict[str, Any]:
    """Adds an image of one gzip layer; returns its descriptor."""
    layer, diff_id = base_layer()
    config = json.dumps(base_config([diff_id], **config_changes), indent=2).encode()
    return source.add_manifest(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": source.add_blob(config, OCI_CONFIG),
            "layers": [source.add_blob(layer, OCI_LAYER_GZIP)],
        },
        *tags,
    )


class MemorySink:
    """Keeps blobs by digest. `parallel` may be set; `lose` is forgotten once, as by a garbage collection."""

    def __init__(self, parallel: int = 4) -> None:
        self.parallel = parallel
        self.blobs: dict[Digest, bytes] = {}
        self.sent: list[Digest] = []
        self.manifest: bytes | None = None
        self.config: bytes | None = None
        self.aborted = False
        self._mutex = threading.Lock()

    def has(self, digest: Digest, size: int) -> bool:
        return digest in self.blobs

    def put_blob(self, blob: Blob, on_bytes: OnBytes) -> Digest:
        kept = bytearray()
        digest = pour(blob, kept.extend, on_bytes)
        with self._mutex:
            self.blobs[digest] = bytes(kept)
            self.sent.append(digest)
        return digest

    def put_manifest(self, manifest: bytes, config: bytes, layers: tuple[Descriptor, ...]) -> Descriptor:
        if missing := [layer.digest for layer in layers if layer.digest not in self.blobs]:
            raise DuopackError(f"missing {missing}")
        self.manifest, self.config = manifest, config
        return Descriptor(OCI_MANIFEST, Digest.of(manifest), len(manifest))

    def abort(self) -> None:
        self.aborted = True
