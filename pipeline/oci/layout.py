"""Images in a directory: the OCI image layout 1.0 (image-spec, image-layout.md).

Writers lock the `oci-layout` file, which is never replaced, while they change `index.json`; blobs need no
lock, since each appears whole under its digest.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.errors import DuopackError, quoted
from pipeline.files import disk_errors, require_space, write_atomically
from pipeline.oci.digest import Digest
from pipeline.oci.documents import canonical, config_platform, parse_descriptor, parse_object
from pipeline.oci.hashing import FileContent, Piece, pour
from pipeline.oci.model import (
    MAX_CONFIG,
    MAX_MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    Blob,
    Described,
    Descriptor,
    OnBytes,
)
from pipeline.oci.partial import PartialFile, make_directory, sweep
from pipeline.oci.ranges import pread_exactly
from pipeline.oci.reference import DEFAULT_TAG

REF_NAME = "org.opencontainers.image.ref.name"
IMAGE_NAME = "io.containerd.image.name"
"""The whole name of an image in index.json, as containerd and `docker save` write it."""

_VERSION = "1.0.0"
_PARTIAL = ".partial-"
_DAMAGED = "the layout is damaged: delete this file if it is there, then build or copy the image again"


@dataclass(frozen=True)
class LayoutBlob(Described):
    """A blob in a layout, checked against its digest whenever it is read."""

    path: Path
    descriptor: Descriptor

    def read(self, offset: int = 0) -> Iterator[Piece]:
        """The bytes from `offset`. Raises DuopackError when the file is missing, cut or damaged."""
        return FileContent(self.path, self.size, self.digest.hex, mend=_DAMAGED).read(offset)

    def read_range(self, offset: int, size: int) -> bytes:
        """A part, unchecked. Raises DuopackError when the file is missing or has another size."""
        if (found := _size_of(self.path)) != self.size:
            raise DuopackError(
                f"the blob has {found} bytes, not {self.size}" if found >= 0 else "the blob is missing",
                where=str(self.path),
                mend=_DAMAGED,
            )
        return pread_exactly(self.path, offset, size, mend=_DAMAGED)


@dataclass(frozen=True)
class LayoutSource:
    """Reads images from a layout directory."""

    directory: Path

    def manifest(self, reference: str = "") -> tuple[Descriptor, bytes]:
        """The manifest or index under a tag or a digest; without a reference, the only image there is.

        Raises DuopackError when the directory is no layout, or has no such image: it names those it has.
        """
        descriptor = self._named(self.entries(), reference)
        if descriptor.size > MAX_MANIFEST:
            raise DuopackError(
                f"the manifest is said to have {descriptor.size} bytes",
                where=str(self.directory),
                mend=_DAMAGED,
            )
        return descriptor, b"".join(self.blob(descriptor).read())

    def blob(self, descriptor: Descriptor) -> Blob:
        """A blob of the layout; it is opened when it is read."""
        return LayoutBlob(_blob_path(self.directory, descriptor.digest), descriptor)

    def entries(self) -> tuple[Descriptor, ...]:
        """The images of the layout as index.json lists them."""
        index = _read_index(self.directory)
        return tuple(
            parse_descriptor(entry, where=str(self.directory / "index.json")) for entry in index["manifests"]
        )

    def _named(self, entries: tuple[Descriptor, ...], reference: str) -> Descriptor:
        if reference.startswith("sha256:"):
            return self._by_digest(entries, Digest(reference))
        names = [entry.annotations.get(REF_NAME, "") for entry in entries]
        if not reference and len(set(names)) > 1 and DEFAULT_TAG in names:
            # Of several it is the one that is written when no tag is given.
            return self._named(entries, DEFAULT_TAG)
        matching = [
            entry for entry, name in zip(entries, names, strict=True) if not reference or name == reference
        ]
        if len({entry.digest for entry in matching}) == 1:
            return matching[-1]
        have = (
            ", ".join(quoted(name, 80) or "(one without a tag)" for name in sorted(set(names))[:20])
            or "no image"
        )
        called = f" '{quoted(reference)}'" if reference else ""
        wanted = "there are several images" if matching else "there is no such image"
        raise DuopackError(
            f"{wanted}{called}; the layout has: {have}",
            where=str(self.directory),
            mend="name one: oci:DIR:TAG",
        )

    def _by_digest(self, entries: tuple[Descriptor, ...], digest: Digest) -> Descriptor:
        """An image by digest, also one that only an index in the layout refers to."""
        for entry in entries:
            if entry.digest == digest:
                return entry
        path = _blob_path(self.directory, digest)
        if not path.is_file():
            raise DuopackError(
                f"there is no image {digest}", where=str(self.directory), mend="name another image"
            )
        size = path.stat().st_size
        unknown = Descriptor(OCI_MANIFEST, digest, size)
        if size > MAX_MANIFEST:
            return unknown
        value = parse_object(b"".join(self.blob(unknown).read()), where=str(path))
        default = OCI_INDEX if "manifests" in value else OCI_MANIFEST
        return replace(unknown, media_type=str(value.get("mediaType", default)))


@dataclass
class LayoutSink:
    """Writes one image into a layout directory, made when it is not there, under a tag.

    Other images of the layout stay. Several processes may write at the same time. `name`, when given, is kept as
    the image's whole name. With `listed` false the image is not entered into index.json: an index will name it.
    Blobs of `elsewhere` are left out: whoever gets the layout has them.
    """

    directory: Path
    tag: str = "latest"
    name: str = ""
    listed: bool = True
    elsewhere: frozenset[Digest] = frozenset()
    parallel: int = 2
    _ready: bool = field(default=False, init=False, repr=False)

    def has(self, digest: Digest, size: int) -> bool:
        """Whether the blob is there in its right size, or need not be; readers check its bytes."""
        if digest in self.elsewhere:
            return True
        try:
            return _blob_path(self.directory, digest).stat().st_size == size
        except (FileNotFoundError, NotADirectoryError):
            return False

    def put_blob(self, blob: Blob, on_bytes: OnBytes) -> Digest:
        """Writes the blob beside its place and gives it its name when it is whole and on the disk."""
        self._prepare()
        if blob.digest and self.has(blob.digest, blob.size):
            return blob.digest
        folder = self._blobs
        require_space(folder, blob.size, purpose="a layer")
        with PartialFile(folder, _PARTIAL) as partial:
            digest = pour(blob, partial.write, on_bytes)
            if not self.has(digest, blob.size):
                partial.commit(folder / digest.hex)
        return digest

    def put_manifest(self, manifest: bytes, config: bytes, layers: tuple[Descriptor, ...]) -> Descriptor:
        """Writes config and manifest, enters the image into index.json under the tag, and reads it back."""
        self._prepare()
        if missing := [layer.digest for layer in layers if not self.has(layer.digest, layer.size)]:
            raise DuopackError(f"the layer {missing[0]} is gone from the layout", where=str(self.directory))
        self._store(config)
        media_type = parse_object(manifest, where="manifest").get("mediaType", OCI_MANIFEST)
        platform = config_platform(parse_object(config, where="config", limit=MAX_CONFIG))
        descriptor = Descriptor(media_type, self._store(manifest), len(manifest), platform=platform or None)
        return self._publish(descriptor, manifest)

    def put_index(self, index: bytes) -> Descriptor:
        """Enters an index, whose images are in the layout, into index.json under the tag."""
        self._prepare()
        return self._publish(Descriptor(OCI_INDEX, self._store(index), len(index)), index)

    def abort(self) -> None:
        """Nothing to do: what is not finished has no name, and goes with its writer."""

    @property
    def _blobs(self) -> Path:
        return self.directory / "blobs" / "sha256"

    def _prepare(self) -> None:
        """Makes the directory a layout, unless it is one; removes what killed writers left."""
        if self._ready:
            return
        with disk_errors(self.directory):
            _refuse_other_directories(self.directory)
            make_directory(self.directory)
            with _locked(self.directory) as handle:
                if os.fstat(handle).st_size == 0:
                    os.write(handle, canonical({"imageLayoutVersion": _VERSION}))
                    os.fsync(handle)
                _check_version(self.directory)
                self._blobs.mkdir(parents=True, exist_ok=True)
                if not (self.directory / "index.json").exists():
                    write_atomically(self.directory / "index.json", canonical(_empty_index()))
                # index.json is written by write_atomically, under this lock: a leftover has no living writer.
                for leftover in self.directory.glob(".index.json.*"):
                    leftover.unlink()
            sweep(self._blobs, _PARTIAL)
        self._ready = True

    def _publish(self, descriptor: Descriptor, document: bytes) -> Descriptor:
        if self.listed:
            with _locked(self.directory):
                self._enter(descriptor)
        reference = self.tag if self.listed and self.tag else str(descriptor.digest)
        found, data = LayoutSource(self.directory).manifest(reference)
        if data != document or found.digest != descriptor.digest:
            raise DuopackError(
                "the image that was written is not there any more", where=str(self.directory),
                mend="something else writes the same tag: run the same command again",
            )  # fmt: skip
        return descriptor

    def _store(self, data: bytes) -> Digest:
        digest = Digest.of(data)
        with PartialFile(self._blobs, _PARTIAL) as partial:
            partial.write(data)
            partial.commit(self._blobs / digest.hex)
        return digest

    def _enter(self, descriptor: Descriptor) -> None:
        index = _read_index(self.directory)
        names = {REF_NAME: self.tag, IMAGE_NAME: self.name}
        named = replace(descriptor, annotations={key: name for key, name in names.items() if name})
        others = [entry for entry in index["manifests"] if _name_of(entry) != self.tag]
        index["manifests"] = [*others, named.to_json()]
        write_atomically(self.directory / "index.json", canonical(index))


def _empty_index() -> dict[str, Any]:
    return {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}


def _blob_path(directory: Path, digest: Digest) -> Path:
    return directory / "blobs" / "sha256" / digest.hex


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _name_of(entry: Any) -> str:
    annotations = entry.get("annotations") if isinstance(entry, dict) else None
    return str(annotations.get(REF_NAME, "")) if isinstance(annotations, dict) else ""


def _read_index(directory: Path) -> dict[str, Any]:
    _check_version(directory)
    path = directory / "index.json"
    value = parse_object(_read_bounded(path), where=str(path))
    if not isinstance(value.get("manifests"), list):
        raise DuopackError("index.json has no list of manifests", where=str(path), mend=_DAMAGED)
    return value


def _check_version(directory: Path) -> None:
    path = directory / "oci-layout"
    value = parse_object(_read_bounded(path), where=str(path))
    if value.get("imageLayoutVersion") != _VERSION:
        found = quoted(repr(value.get("imageLayoutVersion")), 40)
        raise DuopackError(
            f"the layout version is {found}, not {_VERSION}", where=str(path), mend="use another directory"
        )


def _read_bounded(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_MANIFEST + 1)
    except OSError as error:
        raise DuopackError(
            f"this is not an OCI image layout: {path.name}: {error.strerror}",
            where=str(path.parent),
            mend="check the directory's name, or build the image into it first",
        ) from error


def _refuse_other_directories(directory: Path) -> None:
    """A directory with other things in it must not be strewn with blobs because of a mistyped name."""
    # In this order: oci-layout is the first thing that another writer makes.
    if directory.is_dir() and any(directory.iterdir()) and not (directory / "oci-layout").exists():
        raise DuopackError(
            "the directory is not empty and not an OCI layout",
            where=str(directory),
            mend="choose an empty one",
        )


@contextmanager
def _locked(directory: Path) -> Iterator[int]:
    handle = os.open(directory / "oci-layout", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        with suppress(OSError):
            os.close(handle)
