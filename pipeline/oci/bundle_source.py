"""Images read from a bundle (bundle.py), in one file or in parts, without joining or unpacking it.

Every blob is checked against its digest while it is read, so that a damaged part cannot go unnoticed; a layer
that was left out is only missed when somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pipeline.errors import DuopackError
from pipeline.oci.digest import Digest
from pipeline.oci.documents import parse_descriptor, parse_object
from pipeline.oci.hashing import SideHash
from pipeline.oci.limits import Budget, Limits
from pipeline.oci.model import MAX_MANIFEST, OCI_INDEX, OCI_MANIFEST, Blob, Described, Descriptor
from pipeline.oci.ranges import RangeReader
from pipeline.oci.split import Parts
from pipeline.oci.tarindex import Member, TarError, members

_MAX_MEMBERS = 100_000
_DAMAGED = "it is damaged or cut off: copy it here again"


@dataclass(frozen=True)
class BundledBlob(Described):
    """A file inside the bundle. Read from its start it is checked against its digest at the end."""

    parts: Parts
    begin: int
    descriptor: Descriptor

    def read(self, offset: int = 0) -> Iterator[bytes]:
        """The bytes from `offset`. Raises DuopackError when they are gone or not those of the digest."""
        with SideHash() as hasher:
            for piece in self.parts.read_between(self.begin + offset, self.begin + self.size):
                if offset == 0:
                    hasher.update(piece)
                yield piece
            if offset == 0 and hasher.hexdigest() != self.digest.hex:
                raise DuopackError(
                    f"the blob {self.digest} has other bytes than its digest says",
                    where=str(self.parts.paths[0]),
                    mend=_DAMAGED,
                )

    def read_range(self, offset: int, size: int) -> bytes:
        """A part, unchecked."""
        return self.parts.read_range(self.begin + offset, size)


@dataclass(frozen=True)
class BundleSource:
    """A bundle as a place to read from; `parts` must not change meanwhile."""

    parts: Parts
    _limits: Limits = field(default=Limits(members=_MAX_MEMBERS), repr=False)

    @property
    def is_bundle(self) -> bool:
        """Whether there is an OCI layout inside; an older `docker save` has none."""
        return "index.json" in self._files and "oci-layout" in self._files

    def entries(self) -> tuple[Descriptor, ...]:
        """The images as index.json lists them. Raises DuopackError when there is none, or it is malformed."""
        member = self._files.get("index.json")
        if member is None:
            raise self._bad("it has no index.json")
        where = f"{self.parts.paths[0]}: index.json"
        listed = parse_object(self._content(member), where=where).get("manifests")
        if not isinstance(listed, list):
            raise self._bad("its index.json has no list of manifests")
        return tuple(parse_descriptor(entry, where=where) for entry in listed)

    def manifest(self, reference: str) -> tuple[Descriptor, bytes]:
        """The manifest or index with this digest."""
        digest = Digest(reference)
        member = self._files.get(_path(digest))
        if member is None:
            raise self._bad(f"it has no manifest {digest}")
        data = self._content(member)
        if Digest.of(data) != digest:
            raise self._bad(f"the manifest {digest} has other bytes than its digest says")
        value = parse_object(data, where=str(self.parts.paths[0]))
        default = OCI_INDEX if "manifests" in value else OCI_MANIFEST
        return Descriptor(str(value.get("mediaType", default)), digest, len(data)), data

    def blob(self, descriptor: Descriptor) -> Blob:
        """A blob of the bundle. Raises DuopackError when it was left out."""
        member = self._files.get(_path(descriptor.digest))
        if member is None:
            raise DuopackError(
                f"the layer {descriptor.digest} is not in it",
                where=str(self.parts.paths[0]),
                mend="it was exported without the layers of another image (--since): bring that one here first",
            )
        if member.size != descriptor.size or member.kind != "file":
            raise self._bad(f"the blob {descriptor.digest} is not a file of {descriptor.size} bytes")
        return BundledBlob(self.parts, member.offset, descriptor)

    def has(self, descriptor: Descriptor) -> bool:
        """Whether the bundle carries a blob."""
        return _path(descriptor.digest) in self._files

    @cached_property
    def _files(self) -> dict[str, Member]:
        budget = Budget(self._limits)
        try:
            # A name that comes twice means the later one, as for every tar program.
            return {
                one.path: one for one in members(RangeReader(self.parts, budget), budget) if not one.trouble
            }
        except TarError as error:
            raise self._bad(error.what) from error

    def _content(self, member: Member) -> bytes:
        if member.size > MAX_MANIFEST or member.kind != "file":
            raise self._bad(f"'{member.path}' is no file, or larger than {MAX_MANIFEST} bytes")
        return self.parts.read_range(member.offset, member.size)

    def _bad(self, what: str) -> DuopackError:
        return DuopackError(what, where=str(self.parts.paths[0]), mend=_DAMAGED)


def open_parts(path: Path, stem: str) -> Parts | None:
    """The parts `<stem>.001`, … in a directory, in order; None when there are none. A gap is a DuopackError."""
    found = sorted(one for one in path.glob(f"{stem}.[0-9][0-9][0-9]") if one.is_file())
    for number, one in enumerate(found, 1):
        if one.name != f"{stem}.{number:03}":
            raise DuopackError(
                f"the part {stem}.{number:03} is missing", where=str(path), mend="copy all parts here"
            )
    return Parts(tuple(found)) if found else None


def _path(digest: Digest) -> str:
    return f"blobs/sha256/{digest.hex}"
