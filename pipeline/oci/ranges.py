"""Reading parts of a blob: the few bytes that matter of a layer of many GB.

Bytes read so are not checked against the blob's digest, which covers the whole: they are what the place says.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol, runtime_checkable

from pipeline.errors import DuopackError
from pipeline.oci.limits import Budget
from pipeline.oci.model import Blob

SMALLEST = 64 << 10
LARGEST = 4 << 20
"""Bytes asked for at once: little after a jump, more and more while reading on."""


@runtime_checkable
class RangedBlob(Protocol):
    """A blob of which a part can be read without what lies before it."""

    @property
    def size(self) -> int: ...

    def read_range(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`, unchecked. Raises DuopackError when they cannot be had."""
        ...


def read_range(blob: Blob, offset: int, size: int) -> bytes:
    """A part of any blob; one that is not ranged is read up to there."""
    if not 0 <= offset <= offset + size <= blob.size:
        raise DuopackError(f"bytes {offset} to {offset + size} of a blob that has {blob.size}")
    if isinstance(blob, RangedBlob):
        return blob.read_range(offset, size)
    found = bytearray()
    for piece in blob.read(offset):
        found += piece
        if len(found) >= size:
            break
    if len(found) < size:
        raise DuopackError(f"a blob ended early, at {offset + len(found)} of {blob.size} bytes")
    return bytes(found[:size])


def pread_exactly(path: Path, offset: int, size: int, *, mend: str) -> bytes:
    """Bytes of a file. Raises DuopackError when the file is missing, unreadable or too short."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            parts, position = [], offset
            while position < offset + size and (
                piece := os.pread(handle, offset + size - position, position)
            ):
                parts.append(piece)
                position += len(piece)
        finally:
            os.close(handle)
    except OSError as error:
        raise DuopackError(
            f"the file cannot be read: {error.strerror}", where=str(path), mend=mend
        ) from error
    if position < offset + size:
        raise DuopackError(f"the file ends at byte {position}", where=str(path), mend=mend)
    return b"".join(parts)


class RangeReader:
    """A blob as a file to read and to jump forward in; what is jumped over is not read."""

    def __init__(self, blob: Blob, budget: Budget) -> None:
        self.position = 0
        self.size: int | None = blob.size
        self.read_bytes = 0
        self._blob = blob
        self._budget = budget
        self._window = b""
        self._start = 0
        self._next = SMALLEST

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, fewer only at the blob's end."""
        wanted = min(size, self._blob.size - self.position)
        begin = self.position - self._start
        if not (begin >= 0 and begin + wanted <= len(self._window)):
            self._load(wanted)
            begin = 0
        self.position += wanted
        return self._window[begin : begin + wanted]

    def advance(self, position: int) -> bool:
        """Goes forward to `position`; False when the blob ends before."""
        self.position = min(position, self._blob.size)
        return position <= self._blob.size

    def _load(self, wanted: int) -> None:
        self._budget.check_time()
        going_on = self._start <= self.position <= self._start + len(self._window)
        self._next = min(self._next * 2, LARGEST) if going_on and self._window else SMALLEST
        size = min(max(wanted, self._next), self._blob.size - self.position)
        self._window = read_range(self._blob, self.position, size)
        self._start = self.position
        self.read_bytes += size
