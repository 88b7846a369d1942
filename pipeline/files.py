"""Files by name, size and sha256, and the few safe ways in which the pipeline touches a disk."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pipeline.errors import DuopackError, quoted

CHUNK = 1 << 20


@dataclass(frozen=True, order=True)
class FileRecord:
    """One file of a model: path relative to the model's directory (POSIX), size in bytes, sha256 in hex."""

    path: str
    size: int
    sha256: str


def check_relative_path(path: str, *, where: str) -> str:
    """Returns `path` when it names a file inside its directory, on any system and in any terminal.

    Raises DuopackError for an absolute path, `..`, an empty part, a backslash, or a control character
    (Unicode categories Cc, Cf, Cs, Zl, Zp): names from a hub or an image are not to be trusted.
    """
    mend = "this file list is not safe to use; take the model from another source"
    shown = quoted(path)
    if any(unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"} for c in path):
        raise DuopackError(f"the file name '{shown}' has a control character", where=where, mend=mend)
    parts = path.split("/")
    if not path or path.startswith("/") or "\\" in path or any(part in {"", ".", ".."} for part in parts):
        raise DuopackError(f"the file name '{shown}' leaves its directory", where=where, mend=mend)
    if len(path.encode()) > 1024 or any(len(part.encode()) > 255 for part in parts):
        raise DuopackError(f"the file name '{shown}' is too long", where=where, mend=mend)
    return PurePosixPath(path).as_posix()


def sha256_file(
    path: Path, on_bytes: Callable[[int], None] | None = None, *, also: hashlib._Hash | None = None
) -> str:
    """The sha256 of a file in hex, read once in 1 MiB pieces; `on_bytes` is told each piece's size.

    `also` is a second hash that is fed with the same bytes.
    """
    digest = hashlib.sha256()
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            if also:
                also.update(view[:count])
            if on_bytes:
                on_bytes(count)
    return digest.hexdigest()


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Writes beside, syncs and renames: a reader sees the old file or the new one, after a crash too."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes a rename in `path` last through a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_space(
    directory: Path,
    needed: int,
    *,
    purpose: str,
    mend: str = "free that much, or choose another disk with --work DIR or DUOPACK_WORK",
) -> None:
    """Raises DuopackError when the disk that holds `directory` has less than `needed` bytes free."""
    free = shutil.disk_usage(_existing(directory)).free
    if free < needed:
        raise DuopackError(
            f"{purpose} needs {human_size(needed)}, but only {human_size(free)} are free: "
            f"{human_size(needed - free)} short",
            where=str(directory),
            mend=mend,
        )


def require_writable(directory: Path) -> None:
    """Raises DuopackError when nothing can be written into `directory`, there or still to be made."""
    nearest = _existing(directory)
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return
    code = errno.EACCES if nearest.is_dir() else errno.ENOTDIR
    with disk_errors(nearest):
        raise OSError(code, os.strerror(code))


def same_disk(one: Path, other: Path) -> bool:
    """Whether two paths, there or not yet, lie on one file system."""
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


_MENDS = {
    errno.ENOSPC: "free some space, then run the same command again: what is complete is kept",
    errno.EDQUOT: "your quota is used up: free some space, then run the same command again",
    errno.EROFS: "the disk is mounted read-only: choose another place",
    errno.EACCES: "check who owns it and its mode",
    errno.EPERM: "check who owns it and its mode",
    errno.EFBIG: "the file system cannot hold a file of this size: choose another disk",
    errno.ENOENT: "check the path: a directory of it is not there and cannot be made",
    errno.ENOTDIR: "a part of this path is a file, not a directory: choose another path",
    errno.EISDIR: "a directory has the name of a file: move it away, or name a file",
    errno.EEXIST: "something else has this name: move it away, or choose another path",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "a symbolic link leads in a circle: remove it",
    errno.EIO: "the disk or the network behind it fails: look into the kernel's log",
    errno.EMFILE: "raise the limit on open files ('ulimit -n')",
    errno.ENOMEM: "free some memory, then run the same command again",
}


def mend_of(error: OSError) -> str:
    """What to do about a failure of the system; empty for one that no user can have caused."""
    return _MENDS.get(error.errno or 0, "")


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns an OSError about `path` (full disk, quota, read-only, no permission, …) into a DuopackError."""
    try:
        yield
    except OSError as error:
        if not (mend := mend_of(error)):
            raise
        raise DuopackError(
            f"cannot write: {os.strerror(error.errno or 0)}", where=str(path), mend=mend
        ) from error


@contextmanager
def exclusive(lock: Path, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Holds `lock` (an empty file) while the block runs; waits for another duopack, saying so once.

    The kernel lets go of it when the process ends, however it ends.
    """
    with disk_errors(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait(f"waiting for another duopack that holds {lock}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def human_size(size: float) -> str:
    """A size in bytes for people: binary units, three figures."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 99.5 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
