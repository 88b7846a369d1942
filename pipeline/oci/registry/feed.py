"""A blob's bytes on their way out: hashed in order where nobody knows their digest, and able to go back.

A blob that has a digest checks itself while it is read, and the registry checks what it stores against the digest:
hashing such bytes a second time in between would find nothing, and costs as much CPU as all the rest of an upload.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from threading import Event

from pipeline.errors import DuopackError
from pipeline.oci.digest import Digest
from pipeline.oci.hashing import BrokenPromiseError, SideHash
from pipeline.oci.model import Blob
from pipeline.oci.registry.failures import RegistryError

_LARGEST_PIECE = 4 << 20


class Feed:
    """Reads `blob` from its start; `offset` is the next byte to be given, `furthest` the highest it has been.

    Of a blob without a digest, marks keep the hash at an offset, so that going back costs no reading. Raises
    DuopackError when `stop` is set, and when the bytes cannot be had or are not what was promised. Close it
    after use. `beside` says that the hashing has a thread of its own.
    """

    def __init__(self, blob: Blob, stop: Event, *, beside: bool = True) -> None:
        self._blob = blob
        self._stop = stop
        self._marks = {0: hashlib.sha256()}
        self._bytes: Iterator[bytes | memoryview] | None = None
        self._rest = memoryview(b"")
        self._beside = beside
        self._hashing = SideHash(beside=beside)
        self._digest = blob.digest
        self.offset = 0
        self.furthest = 0

    def take(self, count: int) -> Iterator[memoryview]:
        """The next `count` bytes, in pieces of at most 4 MiB."""
        left = count
        while left:
            self.prime()
            piece = self._rest[: min(left, _LARGEST_PIECE)]
            self._rest = self._rest[len(piece) :]
            if self._digest is None:
                self._hashing.update(piece)
            left -= len(piece)
            self.offset += len(piece)
            self.furthest = max(self.furthest, self.offset)
            yield piece

    def prime(self) -> None:
        """Reads the next piece, so that a failure to read comes before anything is sent."""
        while not self._rest:
            if self._stop.is_set():
                raise StoppedError("the upload was stopped", mend="run the same command to go on")
            piece = self._next()
            if piece is None:
                raise self._wrong(f"the bytes ended at {self.offset}")
            self._rest = memoryview(piece).cast("B")

    def mark(self) -> None:
        """Remembers the hash here."""
        if self._digest is None:
            self._marks[self.offset] = self._hashing.state()

    def seek(self, offset: int) -> None:
        """Goes to `offset`, back or forth; where it hashes, what follows the nearest mark is read again."""
        if offset == self.offset:
            return
        if self._digest is not None:
            self.close()
            self.offset = offset
            self.furthest = max(self.furthest, offset)
            return
        start = max(mark for mark in self._marks if mark <= offset)
        self.close()
        self._marks = {mark: state for mark, state in self._marks.items() if mark <= offset}
        self._hashing = SideHash(self._marks[start], beside=self._beside)
        self.offset = start
        for _ in self.take(offset - start):
            pass

    def prefix_sha256(self) -> str:
        """What names everything before `offset`: its sha256 in hex, or one that is made of digest and offset."""
        if self._digest is not None:
            return hashlib.sha256(f"{self._digest} to {self.offset}".encode()).hexdigest()
        return self._hashing.hexdigest()

    def doubt(self) -> bool:
        """Starts over, hashing, since the digest was refused; says whether it had been taken on trust."""
        if self._digest is None:
            return False
        self.close()
        self._digest, self.offset = None, 0
        return True

    def digest(self) -> Digest:
        """The digest of the whole blob, after its last byte was taken; compares it with the promised one."""
        # Asking for more lets a reader that checks at its end do so.
        extra = len(self._next() or b"")
        if self.offset != self._blob.size or self._rest or extra:
            raise self._wrong(f"there are {self.offset + len(self._rest) + extra} bytes")
        found = self._digest or Digest("sha256:" + self._hashing.hexdigest())
        if self._blob.digest not in {None, found}:
            raise self._wrong(f"the bytes have the digest {found}")
        return found

    def close(self) -> None:
        """Lets go of the reader and the thread."""
        closing = getattr(self._bytes, "close", None)
        if closing:
            closing()
        self._bytes, self._rest = None, memoryview(b"")
        self._hashing.hexdigest()

    def _next(self) -> bytes | memoryview | None:
        if self._bytes is None:
            self._bytes = iter(self._blob.read(self.offset))
        try:
            return next(self._bytes, None)
        except RegistryError as error:
            # A source's trouble is not the destination's: nobody here may try that again.
            raise DuopackError(error.what, where=error.where, mend=error.mend) from error

    def _wrong(self, what: str) -> DuopackError:
        promised = f"{self._blob.size} bytes" + (
            f" with the digest {self._blob.digest}" if self._blob.digest else ""
        )
        return BrokenPromiseError(
            f"a layer is not what it was said to be: {what}, and not {promised}",
            mend="nothing may write to its files during a build: run the same command again",
        )


class StoppedError(DuopackError):
    """The work was given up from outside."""
