"""Layers as deterministic tar streams whose size is known before a byte is read.

The format is POSIX.1-2001 pax interchange (IEEE Std 1003.1, "pax"), with extended records only where the
ustar header cannot say it. The headers are written here, not by `tarfile`, so that no Python version can
change a digest; a change of the bytes must come with a new `FINGERPRINT`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from pipeline.errors import DuopackError, quoted
from pipeline.files import check_relative_path
from pipeline.oci.digest import Digest
from pipeline.oci.hashing import FileContent, Piece, StatIdentity
from pipeline.oci.model import OCI_LAYER_TAR

__all__ = [
    "FINGERPRINT",
    "FileContent",
    "StatIdentity",
    "TarEntry",
    "TarLayer",
    "end",
    "header",
    "pack",
    "padding",
]

FINGERPRINT = "duopack-tar-1"
"""Names the bytes that this module makes of given entries: remembered digests are good for it alone."""

LARGE_FILE = 64 << 20
"""Files of this size in bytes and up get a layer of their own."""

_BLOCK = 512
_OCTAL_SIZE_LIMIT = 8**11


def header(path: str, *, size: int = 0, mode: int = 0o644, directory: bool = False) -> bytes:
    """The header blocks of one file or directory, a pax extended header first where it is needed."""
    name = path + "/" if directory else path
    records = {}
    if len(name.encode()) > 100 or not name.isascii():
        records["path"] = name
    if size >= _OCTAL_SIZE_LIMIT:
        records["size"] = str(size)
    ustar_size = 0 if "size" in records else size
    main = _ustar(name, ustar_size, mode, b"5" if directory else b"0")
    if not records:
        return main
    body = b"".join(_pax_record(key, value) for key, value in records.items())
    extended = _ustar("PaxHeaders/" + name.rstrip("/").rpartition("/")[2], len(body), 0o644, b"x")
    return extended + body + padding(len(body)) + main


def padding(size: int) -> bytes:
    """The zeros that fill a body of `size` bytes up to a whole block."""
    return bytes(-size % _BLOCK)


def end() -> bytes:
    """The two zero blocks that end an archive."""
    return bytes(2 * _BLOCK)


def _ustar(name: str, size: int, mode: int, kind: bytes) -> bytes:
    # A reader that knows pax takes the true name from the records; for others ASCII is the safe form.
    short = name.encode("ascii", "replace")[:100]
    before = (
        short.ljust(100, b"\0") + b"%07o\0" % mode + b"0000000\0" * 2 + b"%011o\0" % size + b"%011o\0" % 0
    )
    after = kind + bytes(100) + b"ustar\x0000" + bytes(64) + b"0000000\0" * 2
    after = after.ljust(_BLOCK - len(before) - 8, b"\0")
    checksum = sum(before) + 8 * ord(" ") + sum(after)
    return before + b"%06o\0 " % checksum + after


def _pax_record(key: str, value: str) -> bytes:
    # The record's length counts its own digits: it is the fixed point of this sum.
    body = f" {key}={value}\n".encode()
    length = len(body)
    while length != len(body) + len(str(length)):
        length = len(body) + len(str(length))
    return str(length).encode() + body


@dataclass(frozen=True)
class TarEntry:
    """One regular file of a layer: its path from the root without a leading slash, its mode, its content."""

    path: str
    mode: int
    content: bytes | FileContent

    def __post_init__(self) -> None:
        check_relative_path(self.path, where="layer")
        if self.mode not in {0o644, 0o755}:
            raise ValueError(f"{self.path}: mode {self.mode:o}; a layer's files have 644 or 755")

    @property
    def size(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.size

    @property
    def sha256(self) -> str:
        """The content's sha256 in hex; for a file on disk the promised one."""
        if isinstance(self.content, bytes):
            return hashlib.sha256(self.content).hexdigest()
        return self.content.sha256


@dataclass(frozen=True)
class TarLayer:
    """An uncompressed layer made of entries: a Blob that reads its files when it is read.

    Entries are kept in path order; each directory above them is an entry of its own, 0755. Everything
    belongs to uid and gid 0 and has mtime 0. Raises DuopackError for two entries that cannot both exist.
    """

    entries: Sequence[TarEntry]
    digest: Digest | None = None
    media_type: str = OCI_LAYER_TAR

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.entries, key=lambda entry: entry.path.encode()))
        object.__setattr__(self, "entries", ordered)
        files = {entry.path for entry in ordered}
        folders = {folder for entry in ordered for folder in _parents(entry.path)}
        clashing = sorted(files & folders)
        if len(files) != len(ordered):
            paths = [entry.path for entry in ordered]
            clashing += sorted({path for path in paths if paths.count(path) > 1})
        if clashing:
            raise DuopackError(f"the layer has two entries for '{quoted(clashing[0])}'", where="layer")

    @cached_property
    def size(self) -> int:
        """Bytes of the whole tar stream."""
        return sum(_length(part) for part in self._parts)

    @cached_property
    def key(self) -> str:
        """Names the bytes of this layer without reading them: the memo key for its digest, 64 hex digits."""
        facts = [[entry.path, entry.mode, entry.size, entry.sha256] for entry in self.entries]
        return hashlib.sha256(json.dumps([FINGERPRINT, facts]).encode()).hexdigest()

    @property
    def title(self) -> str:
        """What a person reads beside the progress bar."""
        if len(self.entries) == 1:
            return self.entries[0].path
        tops = {"/".join(entry.path.split("/")[:2]) for entry in self.entries}
        return f"{sorted(tops)[0] if len(tops) == 1 else 'files'} ({len(self.entries)} small files)"

    @property
    def frame(self) -> tuple[bytes, bytes] | None:
        """What comes before and after the content, in a layer that is one file on disk; None for others."""
        if len(self.entries) != 1 or isinstance(self.entries[0].content, bytes):
            return None
        before, after = (part for part in self._parts if isinstance(part, bytes))
        return before, after

    def read(self, offset: int = 0) -> Iterator[Piece]:
        """The tar stream from `offset`; a file that lies wholly before it is not opened.

        Raises DuopackError when a file is not, or does not stay, what its entry promises.
        """
        lengths = [_length(part) for part in self._parts]
        for part, length, stop in zip(self._parts, lengths, accumulate(lengths), strict=True):
            if offset and stop <= offset:
                continue
            start = max(offset - (stop - length), 0)
            if isinstance(part, bytes):
                yield part[start:]
            else:
                yield from part.read(start)

    @cached_property
    def _parts(self) -> tuple[bytes | FileContent, ...]:
        parts: list[bytes | FileContent] = []
        # Headers, padding and small contents between two files on disk are joined into one piece.
        pending = bytearray()
        named: set[str] = set()
        for entry in self.entries:
            for folder in _parents(entry.path):
                if folder not in named:
                    named.add(folder)
                    pending += header(folder, mode=0o755, directory=True)
            pending += header(entry.path, size=entry.size, mode=entry.mode)
            if isinstance(entry.content, bytes):
                pending += entry.content
            else:
                parts += [bytes(pending), entry.content]
                pending.clear()
            pending += padding(entry.size)
        parts.append(bytes(pending) + end())
        return tuple(parts)


def pack(entries: Iterable[TarEntry]) -> tuple[TarLayer, ...]:
    """Files to layers: each file ≥ 64 MiB alone, the small ones of a directory like `models/<name>` together.

    What a layer holds depends on its own directory only, so an image of one model and an image of many
    share blobs. What changes least comes first: large files, then the small ones beside them, and files
    that lie directly in a top directory (scripts) last.
    """
    ordered = sorted(entries, key=lambda entry: entry.path.encode())
    groups: dict[str, list[TarEntry]] = {}
    for entry in ordered:
        groups.setdefault("/".join(entry.path.split("/")[:-1][:2]), []).append(entry)
    layers: list[TarLayer] = []
    for group in sorted(groups, key=lambda name: (-len(name.split("/")) if name else 0, name.encode())):
        small = tuple(entry for entry in groups[group] if entry.size < LARGE_FILE)
        layers += [TarLayer((entry,)) for entry in groups[group] if entry.size >= LARGE_FILE]
        layers += [TarLayer(small)] if small else []
    return tuple(layers)


def _parents(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: depth + 1]) for depth in range(len(parts))]


def _length(part: bytes | FileContent) -> int:
    return len(part) if isinstance(part, bytes) else part.size
