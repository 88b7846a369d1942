"""Images as one file for `docker load`: Docker's archive of config, layers and manifest.json.

The archive is written in one pass: a layer's file is numbered and not named by its digest, known only after
its bytes; manifest.json, which tells what is what, comes last (moby's tarexport and skopeo read it so).
Compressed layers stay as they are: both decompress them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import DuopackError
from pipeline.files import require_space
from pipeline.oci.digest import Digest
from pipeline.oci.documents import canonical, parse_object
from pipeline.oci.hashing import Piece, pour
from pipeline.oci.model import OCI_MANIFEST, Blob, Descriptor, OnBytes
from pipeline.oci.partial import PartialFile, make_directory, sweep
from pipeline.oci.tar import end, header, padding

_FOLDER = "layers"


class ArchiveWriter:
    """Writes Docker's archive piece by piece into `write`; knows nothing of where the bytes go."""

    def __init__(self, write: Callable[[Piece], object]) -> None:
        self._write = write
        self._images: list[dict[str, Any]] = []
        self._files: dict[Digest, str] = {}
        self._begun = 0

    def has(self, digest: Digest) -> bool:
        return digest in self._files

    def add_layer(self, blob: Blob, on_bytes: OnBytes) -> Digest:
        """Appends a layer. When it fails the archive is spoilt and must be given up."""
        if self._begun == 0:
            self._write(header(_FOLDER, mode=0o755, directory=True))
        self._begun += 1
        name = f"{_FOLDER}/{self._begun:04}.tar"
        self._write(header(name, size=blob.size))
        digest = pour(blob, self._write, on_bytes)
        self._write(padding(blob.size))
        self._files[digest] = name
        return digest

    def add_image(
        self,
        name_tag: str,
        config: bytes,
        layers: tuple[Descriptor, ...],
        elsewhere: Mapping[Digest, str] | None = None,
    ) -> None:
        """Appends the config of an image whose layers are there; `name_tag` may be empty.

        `elsewhere` names files for layers that the reader has already and will not open.
        """
        files = {**(elsewhere or {}), **self._files}
        config_name = f"{Digest.of(config).hex}.json"
        self._add_file(config_name, config)
        self._images.append(
            {
                "Config": config_name,
                "RepoTags": [name_tag] if name_tag else [],
                "Layers": [files[layer.digest] for layer in layers],
            }
        )

    def finish(self) -> None:
        """Appends manifest.json and ends the archive."""
        self._add_file("manifest.json", canonical(self._images))
        self._write(end())

    def _add_file(self, name: str, data: bytes) -> None:
        self._write(header(name, size=len(data)))
        self._write(data)
        self._write(padding(len(data)))


@dataclass
class ArchiveSink:
    """Writes one image into a file for `docker load`, which then has the name `name_tag` (`name:tag`).

    Layers are taken one at a time; the file appears under its name when it is whole.
    """

    file: Path
    name_tag: str
    parallel: int = field(default=1, init=False)
    _partial: PartialFile | None = field(default=None, init=False, repr=False)
    _writer: ArchiveWriter | None = field(default=None, init=False, repr=False)

    def has(self, digest: Digest, size: int) -> bool:  # noqa: ARG002
        """Whether this archive has the layer already; an older file of the same name is of no use."""
        return self._writer is not None and self._writer.has(digest)

    def put_blob(self, blob: Blob, on_bytes: OnBytes) -> Digest:
        writer, _ = self._open()
        require_space(self.file.parent, blob.size, purpose="a layer in the archive")
        return writer.add_layer(blob, on_bytes)

    def put_manifest(self, manifest: bytes, config: bytes, layers: tuple[Descriptor, ...]) -> Descriptor:
        """Ends the archive and gives it its name. The digest is that of the image in a registry."""
        self.add_image(self.name_tag, config, layers)
        self.finish()
        return manifest_descriptor(manifest)

    def add_image(self, name_tag: str, config: bytes, layers: tuple[Descriptor, ...]) -> None:
        """Names one image of several, whose layers are in the archive."""
        self._open()[0].add_image(name_tag, config, layers)

    def finish(self) -> None:
        """Ends the archive and gives it its name."""
        writer, partial = self._open()
        writer.finish()
        partial.commit(self.file)
        self._partial = self._writer = None

    def abort(self) -> None:
        """Removes the unfinished file; what was there before under the name stays."""
        if self._partial:
            self._partial.discard()

    def _open(self) -> tuple[ArchiveWriter, PartialFile]:
        if self._writer is None or self._partial is None:
            if self.file.is_dir():
                raise DuopackError("this is a directory", where=str(self.file), mend="name a file")
            prefix = f".{self.file.name}.partial-"
            make_directory(self.file.parent)
            sweep(self.file.parent, prefix)
            self._partial = PartialFile(self.file.parent, prefix)
            self._writer = ArchiveWriter(self._partial.write)
        return self._writer, self._partial


def manifest_descriptor(manifest: bytes) -> Descriptor:
    """The descriptor of a manifest's bytes."""
    value: dict[str, Any] = parse_object(manifest, where="manifest")
    return Descriptor(str(value.get("mediaType", OCI_MANIFEST)), Digest.of(manifest), len(manifest))
