"""Files that are being written: they become visible whole or not at all, and a killed writer's are swept.

A partial file is locked (flock) while its writer lives. The lock goes with the process, however it ends,
so an unlocked partial file is a leftover that anybody may remove.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from pipeline.errors import DuopackError
from pipeline.files import disk_errors, sync_directory


class PartialFile:
    """A new file in `directory` under a temporary name that starts with `prefix`.

    Leaving the context without `commit` removes it. `discard` may be called from another thread: the
    writer's next `write` then fails.
    """

    def __init__(self, directory: Path, prefix: str) -> None:
        self._lock = threading.Lock()
        self._handle = -1
        with disk_errors(directory):
            while self._handle < 0:
                self._open(directory, prefix)

    def _open(self, directory: Path, prefix: str) -> None:
        handle, name = tempfile.mkstemp(prefix=prefix, dir=directory)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # A sweeper may have removed the file between its birth and the lock: then it is made again.
        if os.fstat(handle).st_nlink == 0:
            os.close(handle)
            return
        self._handle, self._path = handle, Path(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def write(self, piece: bytes | memoryview) -> None:
        """Appends. Raises DuopackError for a full disk and the like."""
        rest = memoryview(piece)
        with self._lock, disk_errors(self._path):
            self._require_open()
            while rest:
                rest = rest[os.write(self._handle, rest) :]

    def commit(self, path: Path) -> None:
        """Syncs the bytes and gives the file its name, in place of what had it before."""
        with self._lock, disk_errors(path):
            self._require_open()
            os.fchmod(self._handle, 0o644)
            os.fsync(self._handle)
            self._path.replace(path)
            sync_directory(path.parent)
            self._close()

    def discard(self) -> None:
        """Removes the file unless it was committed."""
        with self._lock:
            if self._handle >= 0:
                with suppress(OSError):
                    self._path.unlink()
                self._close()

    def _require_open(self) -> None:
        if self._handle < 0:
            raise DuopackError("the writing was given up", where=str(self._path))

    def _close(self) -> None:
        os.close(self._handle)
        self._handle = -1


def make_directory(path: Path) -> None:
    """Makes a directory and those above it. Raises DuopackError where a file is in the way."""
    with disk_errors(path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise DuopackError(
                "this cannot be a directory: a file is in the way",
                where=str(path),
                mend="choose another place",
            ) from error


def sweep(directory: Path, prefix: str) -> None:
    """Removes the partial files in `directory` whose writers are dead."""
    for path in directory.iterdir():
        if path.name.startswith(prefix):
            with suppress(OSError):
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(handle)
