"""The files of an image's layers: their names and places, and of some of them the bytes, read where the image lies.

An uncompressed layer is walked from header to header by range reads. A compressed one has to be unpacked from its
start: it is when it is small or when every byte is wanted, else only its beginning, and the rest is said to be unread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from pipeline.errors import DuopackError, quoted
from pipeline.files import human_size
from pipeline.oci.digest import Digest
from pipeline.oci.hashing import SideHash
from pipeline.oci.limits import Budget, LimitError
from pipeline.oci.model import Blob, Descriptor, OnBytes, Source
from pipeline.oci.ranges import RangeReader, read_range
from pipeline.oci.tarindex import Member, Reader, TarError, members
from pipeline.oci.unpack import NoDecompressorError, PieceReader, compression, unpacked

Wanted = Callable[[str, int, bytes], int]
"""Told a file's path, its size, and its first bytes so far: how many of them to keep; asked until it has enough."""

MAX_TRAILING = 64 << 10
"""Bytes of zeros after an archive's end mark; tar fills up to 10 KiB."""
_PIECE = 1 << 20
_MAX_FAULTS = 20


@dataclass(frozen=True)
class Fault:
    """Something wrong with a layer; `id` is for programs, `path` names the entry."""

    id: str
    sentence: str
    path: str = ""


@dataclass(frozen=True)
class LayerContents:
    """What is known of one layer after looking into it. Sizes are in bytes."""

    number: int
    descriptor: Descriptor
    members: tuple[Member, ...] = ()
    entries: int = 0
    """All that were seen; `members` are those that were to be remembered."""
    size: int = 0
    """The content of all files seen."""
    read: int = 0
    """Bytes of the blob that were read for this."""
    complete: bool = False
    """Whether all entries were seen, and remembered as asked."""
    unread: str = ""
    """Why it is not complete, for people; empty when the layer is at fault itself."""
    method: str = ""
    """gzip, zstd, or nothing."""
    diff_id: Digest | None = None
    """The digest of the uncompressed bytes, when all were read."""
    hashes: dict[str, str] = field(default_factory=dict)
    """The sha256 of each file, when every byte was read."""
    heads: dict[str, bytes] = field(default_factory=dict)
    """First bytes of files, as wanted; a layer that can be read in parts needs none."""
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class Look:
    """How to look into layers."""

    budget: Budget
    deep: bool = False
    """Read, hash and check every byte."""
    wanted: Wanted = lambda _path, _size, _head: 0
    skip: frozenset[int] = frozenset()
    """Numbers of layers, from 0 at the bottom, not to look into unless `deep`."""
    keep: Callable[[int, Member], bool] = lambda _number, _member: True
    """Whether an entry of a layer is to be remembered, and hashed when `deep`."""
    parallel: int = 4
    on_bytes: OnBytes = lambda _: None


def look(source: Source, layers: Sequence[Descriptor], how: Look) -> tuple[LayerContents, ...]:
    """Looks into each layer, several at once. What is wrong with one is a fault of it, and stops nothing.

    A layer that comes twice is looked into once. Raises LimitError only when the time is over.
    """
    unique = {layer.digest: number for number, layer in reversed(list(enumerate(layers)))}
    with _pool(how) as pool:
        found = dict(
            zip(
                unique,
                pool.map(lambda number: _look(source, layers[number], number, how), unique.values()),
                strict=True,
            )
        )
    return tuple(
        found[layer.digest]
        if unique[layer.digest] == number
        else replace(found[layer.digest], number=number, read=0)
        for number, layer in enumerate(layers)
    )


@contextmanager
def _pool(how: Look) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(how.parallel, thread_name_prefix="duopack-look")
    try:
        yield pool
    except BaseException:
        how.budget.stop()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


def _look(source: Source, descriptor: Descriptor, number: int, how: Look) -> LayerContents:
    walk = _Walk(number, descriptor, how)
    try:
        blob = source.blob(descriptor)
        walk.magic(blob)
        if how.deep:
            walk.every_byte(blob)
        elif number in how.skip:
            walk.unread = "not looked into: it belongs to the base"
        elif walk.method:
            walk.unpack(blob)
        else:
            walk.ranges(blob)
    except LimitError as error:
        if error.limit == "seconds":
            raise
        walk.fault(f"limit-{error.limit}", error.what)
    except NoDecompressorError as error:
        walk.unread = f"{error.what}; {error.mend}"
    except TarError as error:
        walk.fault("layer-broken", f"it is no sound archive: {error.what}")
    except DuopackError as error:
        walk.fault("layer-unreadable", str(error))
    return walk.result()


class _EnoughError(Exception):
    """As much of a layer was unpacked as was to be."""


class _Walk:
    """One layer's contents in the making."""

    def __init__(self, number: int, descriptor: Descriptor, how: Look) -> None:
        self._number, self._descriptor, self._how = number, descriptor, how
        self.method = ""
        self.unread = ""
        self._read = self._entries = self._size = 0
        self._complete = False
        self._room = True
        self._members: list[Member] = []
        self._hashes: dict[str, str] = {}
        self._heads: dict[str, bytes] = {}
        self._faults: dict[str, list[Fault]] = {}
        self._diff_id: Digest | None = None

    def result(self) -> LayerContents:
        return LayerContents(
            number=self._number,
            descriptor=self._descriptor,
            members=tuple(self._members),
            entries=self._entries,
            size=self._size,
            read=self._read,
            complete=self._complete and not self.unread,
            unread=self.unread,
            method=self.method,
            diff_id=self._diff_id,
            hashes=self._hashes,
            heads=self._heads,
            faults=tuple(fault for faults in self._faults.values() for fault in faults),
        )

    def fault(self, id_: str, sentence: str, path: str = "") -> None:
        """Notes it; of many alike only the first are kept."""
        known = self._faults.setdefault(id_, [])
        if len(known) < _MAX_FAULTS:
            known.append(Fault(id_, sentence, quoted(path)))

    def magic(self, blob: Blob) -> None:
        """Reads the first bytes and the last one: that proves that the blob is there, and how long it is."""
        size = self._descriptor.size
        if size == 0:
            raise TarError("it is empty")
        head = read_range(blob, 0, min(4, size))
        read_range(blob, size - 1, 1)
        self._read += len(head) + 1
        self.method = compression(head)
        if bool(self.method) != _said_compressed(self._descriptor.media_type):
            what = self.method or "not compressed"
            self.fault(
                "layer-type", f"it is {what}, and its media type is {quoted(self._descriptor.media_type)}"
            )

    def ranges(self, blob: Blob) -> None:
        """From header to header."""
        reader = RangeReader(blob, self._how.budget)
        try:
            for member in members(reader, self._how.budget):
                self._take(member)
            self._trailing(reader)
        finally:
            self._read += reader.read_bytes
        self._complete = True

    def unpack(self, blob: Blob) -> None:
        """A compressed layer: the whole when it is small, else its beginning."""
        limits = self._how.budget.limits
        is_whole = blob.size <= limits.whole
        most = blob.size if is_whole else limits.peek
        if not self._how.budget.peek(most):
            self.unread = f"not looked into: {human_size(blob.size)} compressed; --deep reads it"
            return
        try:
            self._stream(blob, most)
            self._complete = True
        except _EnoughError:
            self.unread = (
                f"only {human_size(most)} of {human_size(blob.size)} were unpacked; --deep reads all"
            )

    def every_byte(self, blob: Blob) -> None:
        self._stream(blob, None)
        self._complete = True

    def _stream(self, blob: Blob, most: int | None) -> None:
        """Unpacks, hashes when deep, and checks that the bytes are those of the digest when all are read."""
        deep = self._how.deep
        with SideHash() as blob_hash, SideHash() as diff_hash:
            pieces = self._counted(blob, most, blob_hash if deep else None)
            plain = unpacked(pieces, self.method, self._how.budget)
            reader = PieceReader(_hashed(plain, diff_hash) if deep and self.method else plain)
            for member in members(reader, self._how.budget):
                self._take(member)
                if member.kind == "file":
                    self._content(member, reader)
            self._trailing(reader)
            if not deep:
                return
            for _ in pieces:
                pass
            found = Digest(f"sha256:{blob_hash.hexdigest()}")
            self._diff_id = Digest(f"sha256:{diff_hash.hexdigest()}") if self.method else found
        if found != self._descriptor.digest:
            self.fault("layer-digest", f"its bytes have the digest {found}")

    def _counted(self, blob: Blob, most: int | None, hasher: SideHash | None) -> Iterator[bytes | memoryview]:
        count = 0
        for piece in blob.read():
            self._how.budget.check_time()
            count += len(piece)
            self._read += len(piece)
            if most is not None and count > most:
                raise _EnoughError
            if hasher:
                hasher.update(piece)
            self._how.on_bytes(len(piece))
            yield piece

    def _take(self, member: Member) -> None:
        self._entries += 1
        self._size += member.size
        if member.trouble:
            self.fault(f"entry-{member.trouble}", _TROUBLES[member.trouble], member.path)
        if member.kind in {"device", "fifo", "unknown"}:
            self.fault(f"entry-{member.kind}", f"it is {_ODD[member.kind]}", member.path)
        if member.expanded is not None:
            grown = human_size(member.expanded)
            self.fault("entry-sparse", f"it is sparse: {human_size(member.size)} become {grown}", member.path)
        if not self._keeps(member):
            return
        if self._how.budget.keep(member.path):
            self._members.append(member)
        else:
            self.fault("limit-kept", "it has more entries than are remembered")
            self.unread = "not all of its entries were remembered"
            self._room = False

    def _keeps(self, member: Member) -> bool:
        named = member.trouble in {"", "absolute"}
        return self._room and named and self._how.keep(self._number, member)

    def _content(self, member: Member, reader: PieceReader) -> None:
        """The content of a file that goes by: its hash, and its first bytes where they are wanted."""
        if not self._keeps(member):
            return
        head = self._head(member, reader)
        if not self._how.deep:
            return
        with SideHash() as hasher:
            hasher.update(head)
            left = member.size - len(head)
            while left and (part := reader.part(min(left, _PIECE))):
                hasher.update(part)
                left -= len(part)
            if not left:
                self._hashes[member.path] = hasher.hexdigest()

    def _head(self, member: Member, reader: PieceReader) -> bytes:
        head = b""
        while len(head) < (size := min(member.size, self._how.wanted(member.path, member.size, head))):
            if size > self._how.budget.limits.document:
                break
            try:
                self._how.budget.hold(size - len(head))
            except LimitError as error:
                self.fault("limit-documents", error.what, member.path)
                break
            more = reader.read(size - len(head))
            if not more:
                break
            head += more
        if head:
            self._heads[member.path] = head
        return head

    def _trailing(self, reader: Reader) -> None:
        """What lies behind the end mark: zeros that fill up a block, else something is hidden there."""
        count, sound = 0, True
        while piece := reader.read(4096):
            count += len(piece)
            sound = sound and not any(piece)
            if count > MAX_TRAILING and reader.size is not None:
                count += reader.size - reader.position
                break
        if not sound or count > MAX_TRAILING:
            self.fault(
                "layer-trailing", f"{count} bytes follow the end of its archive: no program unpacks them"
            )


_TROUBLES: dict[str, str] = {
    "outside": "its name leaves the directory that the layer is unpacked into",
    "absolute": "its name begins with '/'",
    "unprintable": "its name has control characters",
    "too-long": "its name is too long or too deep",
}
_ODD: dict[str, str] = {"device": "a device node", "fifo": "a named pipe", "unknown": "of an unknown type"}


def _said_compressed(media_type: str) -> bool:
    return media_type.endswith(("gzip", "zstd"))


def _hashed(pieces: Iterator[bytes | memoryview], hasher: SideHash) -> Iterator[bytes | memoryview]:
    for piece in pieces:
        hasher.update(piece)
        yield piece


def read_config(source: Source, descriptor: Descriptor) -> bytes:
    """A config's bytes, checked against its digest. Raises DuopackError."""
    digest, data = hashlib.sha256(), bytearray()
    for piece in source.blob(descriptor).read():
        digest.update(piece)
        data += piece
        if len(data) > descriptor.size:
            break
    if digest.hexdigest() != descriptor.digest.hex:
        raise DuopackError(
            f"the config's bytes have the sha256 {digest.hexdigest()}, not that of the manifest",
            where=str(descriptor.digest),
            mend="do not use this image: push it again from where it was made",
        )
    return bytes(data)
