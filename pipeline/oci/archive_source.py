"""Images read from a docker archive where it lies: `docker save`, skopeo, buildah and this project write them.

Docker's archive names its layers in manifest.json and gives no digests of compressed ones; since docker 25 an OCI
layout lies in the same file, whose manifest is then used. Facts: moby, image/tarexport; image-spec, image-layout.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.errors import DuopackError, quoted
from pipeline.files import CHUNK
from pipeline.oci.digest import Digest
from pipeline.oci.documents import Manifest, canonical, parse_descriptor, parse_document, parse_object
from pipeline.oci.hashing import SideHash
from pipeline.oci.limits import Budget, Limits
from pipeline.oci.model import (
    MAX_CONFIG,
    MAX_MANIFEST,
    OCI_CONFIG,
    OCI_LAYER_GZIP,
    OCI_LAYER_TAR,
    OCI_LAYER_ZSTD,
    OCI_MANIFEST,
    Blob,
    Descriptor,
)
from pipeline.oci.ranges import RangeReader, pread_exactly
from pipeline.oci.tarindex import Member, TarError, members
from pipeline.oci.unpack import GZIP_MAGIC, ZSTD_MAGIC, compression

MAX_MEMBERS = 100_000
"""Files of an archive; docker save writes three a layer."""
_MAX_LINKS = 8
_DAMAGED = "the archive is damaged or cut off: copy it again"
_LAYER_TYPES = {"": OCI_LAYER_TAR, "gzip": OCI_LAYER_GZIP, "zstd": OCI_LAYER_ZSTD}
_NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


@dataclass(frozen=True)
class ArchiveBlob:
    """A file inside the archive. Read from its start it is checked against its digest at the end."""

    path: Path
    begin: int
    size: int
    digest: Digest
    media_type: str

    def read(self, offset: int = 0) -> Iterator[bytes]:
        """The bytes from `offset`. Raises DuopackError when they cannot be had or are not those of the digest."""
        with SideHash() as hasher:
            for position in range(offset, self.size, CHUNK):
                piece = self.read_range(position, min(CHUNK, self.size - position))
                if offset == 0:
                    hasher.update(piece)
                yield piece
            if offset == 0 and hasher.hexdigest() != self.digest.hex:
                raise DuopackError(
                    f"a part of it has the sha256 {hasher.hexdigest()} and not {self.digest.hex}",
                    where=str(self.path),
                    mend=_DAMAGED,
                )

    def read_range(self, offset: int, size: int) -> bytes:
        """A part, unchecked."""
        return pread_exactly(self.path, self.begin + offset, size, mend=_DAMAGED)


@dataclass(frozen=True)
class ArchiveSource:
    """Reads images from an archive file, which must not change meanwhile.

    A manifest has the digest that it has in a registry where the archive tells it (an OCI layout inside), else one
    is made from config and layers. Compressed layers without a digest in their names are hashed for it, once.
    """

    path: Path
    name_tag: str = ""
    """The image meant by an empty reference: `name:tag` as docker shows it."""
    _documents: dict[str, tuple[Descriptor, bytes]] = field(default_factory=dict, compare=False, repr=False)
    _places: dict[Digest, Member] = field(default_factory=dict, compare=False, repr=False)

    def manifest(self, reference: str = "") -> tuple[Descriptor, bytes]:
        """The manifest of the image with this name (`name:tag`, or the tag alone), or digest; '' is the only one.

        Raises DuopackError when this is no such archive, or has no such image: it names those it has.
        """
        if reference not in self._documents:
            found = self._by_digest(reference) if reference.startswith("sha256:") else self._named(reference)
            self._documents[reference] = self._documents[str(found[0].digest)] = found
        return self._documents[reference]

    def blob(self, descriptor: Descriptor) -> Blob:
        """A blob of an image whose manifest has been read."""
        member = self._places.get(descriptor.digest) or self._file(_blob_name(descriptor.digest))
        if member is None or member.size != descriptor.size:
            raise self._bad(f"it has no blob {descriptor.digest} of {descriptor.size} bytes")
        return ArchiveBlob(self.path, member.offset, member.size, descriptor.digest, descriptor.media_type)

    def names(self) -> tuple[str, ...]:
        """The images in the archive as manifest.json names them; one without a name is ''."""
        return tuple(name for entry in self._entries for name in entry.tags or ("",))

    def _named(self, reference: str) -> tuple[Descriptor, bytes]:
        wanted = self.name_tag if reference in {"", self.name_tag.rpartition(":")[2]} else reference
        matching = [one for one in self._entries if not wanted or one.has(wanted)]
        if len(matching) != 1:
            have = ", ".join(quoted(name, 80) or "(one without a name)" for name in self.names()[:20])
            number = "single image" if matching else "image"
            raise DuopackError(
                f"there is no {number} '{quoted(wanted)}'; the archive has: {have}",
                where=str(self.path),
                mend=f"name one: docker-archive:{self.path}:NAME:TAG",
            )
        entry = matching[0]
        return self._original(entry) or self._made(entry)

    def _by_digest(self, reference: str) -> tuple[Descriptor, bytes]:
        digest = Digest(reference)
        member = self._file(_blob_name(digest))
        if member is None:
            raise self._bad(f"it has no manifest {digest}")
        data = self._content(member, MAX_MANIFEST)
        if Digest.of(data) != digest:
            raise self._bad(f"the manifest {digest} has other bytes than its digest says")
        kind = parse_object(data, where=str(self.path)).get("mediaType", OCI_MANIFEST)
        return Descriptor(str(kind), digest, len(data)), data

    def _original(self, entry: _Entry) -> tuple[Descriptor, bytes] | None:
        """The OCI manifest of the same image, when the archive has one.

        `docker load` reads manifest.json or index.json, by its kind of store: both must mean one image.
        """
        for one in self._oci_images:
            found, data = self._by_digest(str(one.digest))
            document = parse_document(data, one.media_type, where=str(self.path))
            if isinstance(document, Manifest) and document.config.digest == Digest.of(self._config(entry)):
                return found, data
        return None

    def _made(self, entry: _Entry) -> tuple[Descriptor, bytes]:
        config = self._config(entry)
        if self._oci_images and not self._has_index_of_indexes:
            raise self._bad(
                "its manifest.json and its index.json are about different images",
                "do not load it: what an engine gets from it depends on the engine",
            )
        value = parse_object(config, where=f"{self.path}: config", limit=MAX_CONFIG)
        rootfs = value.get("rootfs")
        diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
        if not isinstance(diff_ids, list) or len(diff_ids) != len(entry.layers):
            raise self._bad(f"it has {len(entry.layers)} layers, and its config tells of another number")
        layers = [self._layer(name, diff_id) for name, diff_id in zip(entry.layers, diff_ids, strict=True)]
        self._places[Digest.of(config)] = self._require(entry.config)
        data = canonical(
            {
                "schemaVersion": 2,
                "mediaType": OCI_MANIFEST,
                "config": Descriptor(OCI_CONFIG, Digest.of(config), len(config)).to_json(),
                "layers": [layer.to_json() for layer in layers],
            }
        )
        return Descriptor(OCI_MANIFEST, Digest.of(data), len(data)), data

    def _layer(self, name: str, diff_id: Any) -> Descriptor:
        member = self._require(name)
        method = compression(pread_exactly(self.path, member.offset, min(member.size, 4), mend=_DAMAGED))
        if not isinstance(diff_id, str):
            raise self._bad("a diff id in its config is no text")
        # An uncompressed layer's digest is its diff id, by the format: it is checked whenever it is read.
        digest = Digest(diff_id) if not method else self._hashed(name, member)
        self._places[digest] = member
        return Descriptor(_LAYER_TYPES[method], digest, member.size)

    def _hashed(self, name: str, member: Member) -> Digest:
        hexes = name.removeprefix("blobs/sha256/")
        if hexes != name and "/" not in hexes:
            return Digest(f"sha256:{hexes}")
        digest = hashlib.sha256()
        for position in range(0, member.size, CHUNK):
            count = min(CHUNK, member.size - position)
            digest.update(pread_exactly(self.path, member.offset + position, count, mend=_DAMAGED))
        return Digest(f"sha256:{digest.hexdigest()}")

    def _config(self, entry: _Entry) -> bytes:
        return self._content(self._require(entry.config), MAX_CONFIG)

    @cached_property
    def _entries(self) -> tuple[_Entry, ...]:
        member = self._file("manifest.json")
        if member is None:
            raise self._bad(
                "it has no manifest.json, so it is not a docker archive",
                "name a file made by docker save, skopeo or duopack",
            )
        try:
            value = json.loads(self._content(member, MAX_MANIFEST))
        except (ValueError, RecursionError) as error:
            raise self._bad(f"its manifest.json is not valid JSON: {quoted(str(error))}") from error
        if not isinstance(value, list) or not value:
            raise self._bad("its manifest.json is not a list of images")
        return tuple(self._entry(one) for one in value)

    def _entry(self, value: Any) -> _Entry:
        found = value if isinstance(value, dict) else {}
        config, layers, tags = found.get("Config"), found.get("Layers") or [], found.get("RepoTags") or []
        texts = [config, *layers, *tags] if isinstance(layers, list) and isinstance(tags, list) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise self._bad("an image in its manifest.json is malformed")
        return _Entry(str(config), tuple(layers), tuple(tags))

    @cached_property
    def _oci_images(self) -> tuple[Descriptor, ...]:
        """What the OCI layout inside lists, if there is one."""
        member = self._file("index.json")
        if member is None:
            return ()
        where = f"{self.path}: index.json"
        listed = parse_object(self._content(member, MAX_MANIFEST), where=where).get("manifests")
        entries = listed if isinstance(listed, list) else []
        return tuple(parse_descriptor(entry, where=where) for entry in entries)

    @cached_property
    def _has_index_of_indexes(self) -> bool:
        """Whether the layout's images are several-platform indexes, which manifest.json cannot show."""
        return any("index" in one.media_type or "list" in one.media_type for one in self._oci_images)

    @cached_property
    def _files(self) -> dict[str, Member]:
        """The archive's files by name. Raises DuopackError for what is no archive."""
        try:
            size = self.path.stat().st_size
            head = pread_exactly(self.path, 0, min(size, 4), mend=_DAMAGED)
        except OSError as error:
            raise DuopackError(
                f"it cannot be read: {error.strerror}", where=str(self.path), mend="check the file's name"
            ) from error
        if head.startswith((GZIP_MAGIC, ZSTD_MAGIC)):
            raise self._bad(
                "the archive is compressed as a whole, so nothing in it can be found without unpacking it",
                "unpack it first (gunzip, unzstd); docker load takes it so too",
            )
        whole = ArchiveBlob(self.path, 0, size, Digest.of(b""), "")
        budget = Budget(Limits(members=MAX_MEMBERS))
        try:
            # A name that comes twice means the later one, as for every tar program.
            return {one.path: one for one in members(RangeReader(whole, budget), budget) if not one.trouble}
        except TarError as error:
            raise self._bad(error.what) from error

    def _file(self, name: str) -> Member | None:
        """A regular file; docker save makes a link of a layer that comes again."""
        for _ in range(_MAX_LINKS):
            member = self._files.get(_joined("", name))
            if member is None or member.kind == "file":
                return member
            if member.kind not in {"symlink", "hardlink"}:
                return None
            name = _joined(name.rpartition("/")[0] if member.kind == "symlink" else "", member.link)
        return None

    def _require(self, name: str) -> Member:
        member = self._file(name)
        if member is None:
            raise self._bad(f"its manifest.json names '{quoted(name)}', which it does not have")
        return member

    def _content(self, member: Member, limit: int) -> bytes:
        if member.size > limit:
            raise self._bad(f"'{quoted(member.path)}' has {member.size} bytes; {limit} are accepted")
        return pread_exactly(self.path, member.offset, member.size, mend=_DAMAGED)

    def _bad(self, what: str, mend: str = _DAMAGED) -> DuopackError:
        return DuopackError(what, where=str(self.path), mend=mend)


@dataclass(frozen=True)
class _Entry:
    """One image of manifest.json."""

    config: str
    layers: tuple[str, ...]
    tags: tuple[str, ...]

    def has(self, wanted: str) -> bool:
        """Whether it has this name, or this tag when no name is given; skopeo writes docker.io/library/ before it."""
        return any(
            _familiar(tag) == _familiar(wanted) or (":" not in wanted and tag.rpartition(":")[2] == wanted)
            for tag in self.tags
        )


def _familiar(name: str) -> str:
    return name.removeprefix("docker.io/").removeprefix("library/")


def _blob_name(digest: Digest) -> str:
    return f"blobs/sha256/{digest.hex}"


def _joined(folder: str, name: str) -> str:
    """A name relative to a folder inside the archive; what would leave it ends at its root."""
    parts: list[str] = []
    for part in f"{folder}/{name}".split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in {"", "."}:
            parts.append(part)
    return "/".join(parts)
