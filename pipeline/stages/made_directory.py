"""A directory that a stage makes from another: built beside its place and put there by a rename.

Killed at any point, there is the old result or none, never half of one.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import UsageError
from pipeline.files import CHUNK, FileRecord, check_relative_path, disk_errors, sha256_file, sync_directory
from pipeline.hubs.directory import Directory
from pipeline.weights.check import INDEX_SUFFIX
from pipeline.weights.shards.source import changed

OTHER_WEIGHTS = (".safetensors", INDEX_SUFFIX, ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
"""Endings of files that hold a model in another form, or index it: what is made takes their place."""


@dataclass(frozen=True)
class MadeDirectory:
    """Where a result goes."""

    place: Path

    @property
    def lock(self) -> Path:
        return self.beside("lock")

    @property
    def partial(self) -> Path:
        """Where it is made."""
        return self.beside("partial")

    def beside(self, kind: str) -> Path:
        return self.place.with_name(f".{self.place.name}.{kind}")

    def put_in_place(self) -> None:
        """Two renames when there is an old result: between them there is none, and never half of one."""
        old = self.beside("old")
        with disk_errors(self.place):
            if self.place.exists():
                self.place.rename(old)
            self.partial.rename(self.place)
            sync_directory(self.place.parent)
        shutil.rmtree(old, ignore_errors=True)

    def remove(self, *kinds: str) -> None:
        """Removes what a killed run left; its lock must be held."""
        for kind in kinds:
            leftover = self.beside(kind)
            if leftover.exists():
                with disk_errors(leftover):
                    shutil.rmtree(leftover)


class Digests:
    """The records of a directory's files, hashed in a thread beside the work of the block."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self._directory = directory
        self._names = names
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._stop = False

    def __enter__(self) -> Digests:
        self._futures: list[Future[FileRecord]] = [self._pool.submit(self._one, name) for name in self._names]
        return self

    def result(self) -> tuple[FileRecord, ...]:
        return tuple(sorted(future.result() for future in self._futures))

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _one(self, name: str) -> FileRecord:
        path = self._directory / name
        before = path.stat()
        digest = sha256_file(path, self._check_stopped)
        after = path.stat()
        if _identity(before) != _identity(after):
            raise changed(path)
        return FileRecord(name, after.st_size, digest)

    def _check_stopped(self, count: int) -> None:
        del count
        if self._stop:
            raise InterruptedError(errno.EINTR, "the run ended before the source was hashed")


def check_places(source: Path, destination: Path) -> None:
    """Refuses a source that is no directory, and a destination in, around or equal to it."""
    if not source.is_dir():
        raise UsageError(
            "there is no such directory", where=str(source), mend="name the directory of a model"
        )
    inner, outer = destination.resolve(), source.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise UsageError(
            f"the destination {destination} and the source {source} lie in each other",
            mend="name a directory outside the source: everything in it is replaced",
        )
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise UsageError(
            "it is there, and no directory", where=str(destination), mend="name another destination"
        )


def list_files(source: Path) -> tuple[str, ...]:
    """Every file of a model's directory by its path there. Raises DuopackError for a name that is not safe."""
    return tuple(check_file_name(file.path) for file in Directory(source).listing().files)


def check_file_name(name: str) -> str:
    return check_relative_path(name, where="the model's files")


def side_files(names: Sequence[str]) -> tuple[str, ...]:
    """What is neither weights nor their index, and travels along."""
    return tuple(name for name in names if not name.lower().endswith(OTHER_WEIGHTS))


def copy_side_file(source: Path, name: str, directory: Path) -> FileRecord:
    """Copies a side file for all to read: quantizers write 0600, and a server may run as another user."""
    target = directory / name
    with (source / name).open("rb") as old, disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as new:
            shutil.copyfileobj(old, new, CHUNK)
            new.flush()
            os.fchmod(new.fileno(), 0o644)
            os.fsync(new.fileno())
    return FileRecord(name, target.stat().st_size, sha256_file(target))


def hashed(directory: Path, names: Sequence[str]) -> tuple[FileRecord, ...]:
    """The records of small files."""
    paths = [(name, directory / name) for name in names]
    return tuple(FileRecord(name, path.stat().st_size, sha256_file(path)) for name, path in paths)


def check_copies(directory: Path, copied: Sequence[FileRecord], source: Sequence[FileRecord]) -> None:
    """Raises DuopackError unless each copy equals the file that was hashed, or that a lock names."""
    known = {one.path: one for one in source}
    for one in copied:
        if one != known[one.path]:
            raise changed(directory / one.path)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_size, status.st_mtime_ns, status.st_ino)
