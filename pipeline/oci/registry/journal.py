"""Uploads that a killed process left open, so that the next run goes on with them.

One small JSON file for each; a file lock keeps a second process out. An entry is a hint, not a truth: the
bytes up to its offset are hashed again and compared before anything is built on it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.errors import DuopackError
from pipeline.files import disk_errors, write_atomically

# Registries throw unfinished uploads away after about a week.
_MAX_AGE_SECONDS = 7 * 24 * 3600
_MAX_ENTRY = 64 << 10


@dataclass(frozen=True)
class OpenUpload:
    """An upload at a chunk's boundary: where it goes on, how many bytes are there, their sha256 in hex."""

    location: str
    offset: int
    sha256: str


class Journal:
    """The open uploads of one repository, kept in `directory`.

    Without a directory, or while another process uses it, nothing is kept and nothing is found.
    """

    def __init__(self, directory: Path | None, place: str) -> None:
        self._directory = directory
        self._place = place
        self._lock = threading.Lock()
        self._handle = -1
        if directory:
            self._claim(directory)

    @property
    def is_kept(self) -> bool:
        return self._handle >= 0

    def find(self, key: str) -> OpenUpload | None:
        """The open upload of the blob that `key` names, if there is one."""
        if not self.is_kept:
            return None
        try:
            with self._path(key).open("rb") as file:
                value = json.loads(file.read(_MAX_ENTRY))
            entry = OpenUpload(str(value["location"]), int(value["offset"]), str(value["sha256"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            self.forget(key)
            return None
        return entry if entry.offset > 0 else None

    def record(self, key: str, entry: OpenUpload) -> None:
        """Keeps an upload's state in the place of an earlier one; a full disk costs only the hint."""
        if not self.is_kept:
            return
        with suppress(DuopackError, OSError):
            # The location may let its bearer write to the upload: for the owner's eyes.
            write_atomically(self._path(key), json.dumps(asdict(entry)).encode(), mode=0o600)

    def forget(self, key: str) -> None:
        """Removes an entry: its upload is finished, or lost."""
        if self.is_kept:
            with suppress(OSError):
                self._path(key).unlink()

    def close(self) -> None:
        """Lets other processes in; entries stay."""
        with self._lock:
            if self.is_kept:
                os.close(self._handle)
                self._handle = -1

    def _claim(self, directory: Path) -> None:
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            return
        self._handle = handle
        oldest = time.time() - _MAX_AGE_SECONDS
        for path in directory.glob("*.json*"):
            with suppress(OSError):
                if path.lstat().st_mtime < oldest:
                    path.unlink()

    def _path(self, key: str) -> Path:
        assert self._directory is not None
        return self._directory / (hashlib.sha256(f"{self._place} {key}".encode()).hexdigest()[:32] + ".json")
