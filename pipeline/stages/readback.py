"""Reads a finished image back and holds it against the lock: every byte, where it lies.

Each blob is hashed while it is read; each file in the model layers must be in the lock with this sha256,
and each file of the lock must be in the layers.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.catalog.target import Target
from pipeline.errors import DuopackError, quoted
from pipeline.lock.values import Lock
from pipeline.oci.documents import parse_object, resolve
from pipeline.oci.model import MAX_CONFIG, OCI_LAYER_TAR, Blob, Source
from pipeline.stages.image import ROOT


@dataclass(frozen=True)
class ReadBack:
    """What was found in an image; sizes in bytes."""

    digest: str
    layers: int
    size: int
    model_files: int
    other_files: tuple[str, ...]
    command: tuple[str, ...]


def read_back(source: Source, reference: str, target: Target, lock: Lock) -> ReadBack:
    """Raises DuopackError for the first difference between the image and the lock."""
    resolved = resolve(source, reference, target.platform)
    manifest = resolved.manifest
    config = parse_object(b"".join(source.blob(manifest.config).read()), where="config", limit=MAX_CONFIG)
    expected = {
        f"{ROOT}/{model.directory}/{file.path}": file.sha256
        for key, model in target.models
        for file in lock.models[key].files
    }
    found: dict[str, str] = {}
    for layer in manifest.layers:
        # The base's layers are compressed and its own affair; ours are plain tar.
        if layer.media_type == OCI_LAYER_TAR:
            found.update(_hashes(source.blob(layer), str(layer.digest)))
    for path, sha256 in expected.items():
        if path not in found:
            raise DuopackError(
                f"'{quoted(path)}' is not in the image", where=reference, mend="build it again"
            )
        if found[path] != sha256:
            raise DuopackError(
                f"'{quoted(path)}' has sha256 {found[path]}, the lock says {sha256}",
                where=reference,
                mend="build it again",
            )
    return ReadBack(
        digest=str(resolved.descriptor.digest),
        layers=len(manifest.layers),
        size=sum(layer.size for layer in manifest.layers),
        model_files=len(expected),
        other_files=tuple(sorted(found.keys() - expected.keys())),
        command=tuple((config.get("config") or {}).get("Cmd") or ()),
    )


def _hashes(blob: Blob, where: str) -> Iterator[tuple[str, str]]:
    """The sha256 of each regular file of an uncompressed layer, read as a stream."""
    try:
        with tarfile.open(fileobj=_Stream(blob), mode="r|", bufsize=1 << 20) as archive:
            for member in archive:
                if not member.isfile():
                    continue
                digest = hashlib.sha256()
                file = archive.extractfile(member)
                while file and (piece := file.read(1 << 20)):
                    digest.update(piece)
                yield member.name, digest.hexdigest()
    except tarfile.TarError as error:
        raise DuopackError(
            f"a layer is not a tar archive: {error}", where=where, mend="build it again"
        ) from error


class _Stream(io.RawIOBase):
    """A blob's pieces as a file to read from."""

    def __init__(self, blob: Blob) -> None:
        self._pieces = blob.read()
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes; all that is left when it is negative."""
        parts = []
        while size != 0:
            if not self._rest:
                piece = next(self._pieces, None)
                if piece is None:
                    break
                self._rest = memoryview(piece)
            part = self._rest if size < 0 else self._rest[:size]
            parts.append(bytes(part))
            self._rest = self._rest[len(part) :]
            size -= len(part) if size > 0 else 0
        return b"".join(parts)
