"""Bytes that are checked while they move: hashing beside other work, files with a promised sha256."""

from __future__ import annotations

import hashlib
import os
import queue
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pipeline.errors import DuopackError
from pipeline.files import CHUNK
from pipeline.oci.digest import Digest
from pipeline.oci.model import Blob, OnBytes

Piece = bytes | memoryview

# Below this a hand-over to another thread costs more than the hashing.
_WORTH_A_THREAD = 128 << 10
# Pieces that may wait for the hashing thread: bounds the memory to a few MiB a blob.
_AHEAD = 4


class BrokenPromiseError(DuopackError):
    """A layer's bytes have not the size or the digest that was told before they were read."""


class SideHash:
    """A sha256 that is computed in a thread of its own, so that reading, hashing and sending overlap.

    hashlib lets go of the GIL, so this is real parallelism. Pieces must not change after `update`.
    Use as a context manager: the thread ends with it. `begun` is the state to go on from. Not `beside`
    other work, it hashes on the spot: where other streams keep every core busy, a thread only carries the
    bytes from one core's cache to another's.
    """

    def __init__(self, begun: hashlib._Hash | None = None, *, beside: bool = True) -> None:
        self._beside = beside
        self._hash = begun.copy() if begun else hashlib.sha256()
        self._waiting: queue.Queue[Piece | None] = queue.Queue(_AHEAD)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._drain()

    def update(self, piece: Piece) -> None:
        if not self._beside or (self._thread is None and len(piece) < _WORTH_A_THREAD):
            self._hash.update(piece)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="duopack-sha256", daemon=True)
            self._thread.start()
        self._waiting.put(piece)

    def state(self) -> hashlib._Hash:
        """The hash of everything so far, to go on from later; waits for what is still in the queue."""
        self._drain()
        return self._hash.copy()

    def hexdigest(self) -> str:
        """The sha256 in hex of everything so far; waits for what is still in the queue."""
        self._drain()
        return self._hash.hexdigest()

    def _work(self) -> None:
        while (piece := self._waiting.get()) is not None:
            self._hash.update(piece)

    def _drain(self) -> None:
        if self._thread is None:
            return
        self._waiting.put(None)
        self._thread.join()
        self._thread = None


def pour(blob: Blob, write: Callable[[Piece], object], on_bytes: OnBytes) -> Digest:
    """Reads a blob once, from its start, into `write`; returns the digest of what was written.

    Raises DuopackError when the blob gives other bytes than its `size` or `digest` promise.
    """
    count = 0
    with SideHash() as hasher:
        for piece in blob.read():
            hasher.update(piece)
            write(piece)
            count += len(piece)
            on_bytes(len(piece))
        digest = Digest("sha256:" + hasher.hexdigest())
    if count != blob.size:
        raise BrokenPromiseError(
            f"a layer gave {count} bytes and not the promised {blob.size}",
            where=str(blob.digest or ""),
            mend="the place it comes from is damaged: make that copy again",
        )
    if blob.digest is not None and digest != blob.digest:
        raise BrokenPromiseError(
            f"the bytes have the digest {digest} and not the promised one",
            where=str(blob.digest),
            mend="run the same command again; if it stays so, their source is damaged: make that copy again",
        )
    return digest


@dataclass(frozen=True)
class StatIdentity:
    """What the system says of a file; while all five stay equal, its bytes are taken to be unchanged."""

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> StatIdentity:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True)
class FileContent:
    """A file on disk with its promised size in bytes and sha256 in hex.

    `verified` is the file's identity at the time its bytes were last hashed to `sha256`: a file that is
    still the same is not hashed again. `mend` is the advice when it is not what was promised.
    """

    path: Path
    size: int
    sha256: str
    verified: StatIdentity | None = None
    mend: str = "nothing may write to the files during a build: run the same command again"

    def read(self, offset: int = 0) -> Iterator[Piece]:
        """The bytes from `offset`. The last piece is given only after the whole file has been checked.

        Raises DuopackError when the file is gone or unreadable, when it changes while it is read, or when
        it does not hash to `sha256`.
        """
        try:
            # O_NONBLOCK: a named pipe in place of a file must not hang the build.
            handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            yield from self._checked(handle, offset)
        except OSError as error:
            raise self._unreadable(error) from error
        finally:
            os.close(handle)

    def _checked(self, handle: int, offset: int) -> Iterator[Piece]:
        status = os.fstat(handle)
        before = StatIdentity.of(status)
        if not stat.S_ISREG(status.st_mode):
            raise self._wrong("this is not a regular file")
        if before.size != self.size:
            raise self._wrong(f"the file has {before.size} bytes, not the {self.size} it should have")
        trusted = before == self.verified
        position = min(offset, self.size) if trusted else 0
        with SideHash() as hasher:
            if position == self.size:
                self._check_end(handle, before, None if trusted else hasher)
            while position < self.size:
                piece = os.pread(handle, min(CHUNK, self.size - position), position)
                if not piece:
                    raise self._wrong("the file became shorter while it was being read")
                if not trusted:
                    hasher.update(piece)
                start, position = position, position + len(piece)
                if position == self.size:
                    self._check_end(handle, before, None if trusted else hasher)
                if position > offset:
                    yield piece if start >= offset else memoryview(piece)[offset - start :]

    def _check_end(self, handle: int, before: StatIdentity, hasher: SideHash | None) -> None:
        if os.pread(handle, 1, self.size) or StatIdentity.of(os.fstat(handle)) != before:
            raise self._wrong("the file changed while it was being read")
        if hasher and hasher.hexdigest() != self.sha256:
            raise self._wrong(f"the file has the sha256 {hasher.hexdigest()}, not the expected {self.sha256}")

    def _wrong(self, what: str) -> DuopackError:
        return DuopackError(what, where=str(self.path), mend=self.mend)

    def _unreadable(self, error: OSError) -> DuopackError:
        reason = os.strerror(error.errno) if error.errno else str(error)
        return DuopackError(f"the file cannot be read: {reason}", where=str(self.path), mend=self.mend)
