"""A file in parts of a given size, for disks, sticks and letters that cannot hold it whole; joined by `cat`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pipeline.errors import DuopackError
from pipeline.files import CHUNK, FileRecord, disk_errors
from pipeline.oci.digest import Digest
from pipeline.oci.hashing import SideHash
from pipeline.oci.ranges import pread_exactly

MAX_PARTS = 999
"""As many as three digits count: `cat NAME.*` then joins them in order."""


class PartWriter:
    """Writes `<stem>.001`, `<stem>.002`, … of `part_size` bytes each into a directory, the last one shorter."""

    def __init__(self, directory: Path, stem: str, part_size: int) -> None:
        self._directory = directory
        self._stem = stem
        self._part_size = part_size
        self._records: list[FileRecord] = []
        self._handle = -1
        self._count = 0
        self._hash = SideHash()

    def write(self, piece: bytes | memoryview) -> None:
        """Appends. Raises DuopackError for a full disk and the like."""
        rest = memoryview(piece)
        while rest:
            if self._handle < 0:
                self._begin()
            part, rest = rest[: self._part_size - self._count], rest[self._part_size - self._count :]
            self._hash.update(part)
            self._write(part)
            if self._count == self._part_size:
                self._end()

    def finish(self) -> tuple[FileRecord, ...]:
        """Ends the last part; all of them, in order."""
        if self._handle >= 0:
            self._end()
        return tuple(self._records)

    def close(self) -> None:
        """Lets go of an unfinished part."""
        self._hash.hexdigest()  # ends its thread
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    @property
    def _path(self) -> Path:
        return self._directory / f"{self._stem}.{len(self._records) + 1:03}"

    def _begin(self) -> None:
        if len(self._records) >= MAX_PARTS:
            raise DuopackError(f"it would have more than {MAX_PARTS} parts", mend="make the parts larger")
        self._count = 0
        self._hash = SideHash()
        with disk_errors(self._path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._handle = os.open(self._path, flags, 0o644)

    def _write(self, part: memoryview) -> None:
        self._count += len(part)
        with disk_errors(self._path):
            while part:
                part = part[os.write(self._handle, part) :]

    def _end(self) -> None:
        with disk_errors(self._path):
            os.fsync(self._handle)
        record = FileRecord(self._path.name, self._count, self._hash.hexdigest())
        self.close()
        self._records.append(record)


@dataclass(frozen=True)
class Parts:
    """The joined bytes of files, read where they lie; as a blob whose digest nobody knows."""

    paths: tuple[Path, ...]
    digest: Digest | None = field(default=None, init=False)
    media_type: str = field(default="application/x-tar", init=False)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        try:
            return tuple(path.stat().st_size for path in self.paths)
        except OSError as error:
            raise DuopackError(
                f"it cannot be read: {error.strerror}", where=str(error.filename), mend="copy it there again"
            ) from error

    @property
    def size(self) -> int:
        return sum(self._sizes)

    def read(self, offset: int = 0) -> Iterator[bytes]:
        """The bytes from `offset`."""
        return self.read_between(offset, self.size)

    def read_between(self, begin: int, end: int) -> Iterator[bytes]:
        """The bytes from `begin` to before `end`. Raises DuopackError for a file that is gone or became shorter."""
        start = 0
        for path, size in zip(self.paths, self._sizes, strict=True):
            for position in range(max(begin, start), min(end, start + size), CHUNK):
                count = min(CHUNK, start + size - position, end - position)
                yield pread_exactly(path, position - start, count, mend="copy it there again")
            start += size

    def read_range(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`."""
        found = b"".join(self.read_between(offset, offset + size))
        if len(found) < size:
            raise DuopackError(
                f"it ends at byte {self.size}",
                where=str(self.paths[-1]),
                mend="a part is missing: copy it again",
            )
        return found
