"""A checkpoint as one set of tensors, and its bytes, read where they are."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import DuopackError, quoted
from pipeline.weights.check import check_weights
from pipeline.weights.safetensors import Tensor, read_header


@dataclass(frozen=True)
class Source:
    """Where each tensor of a checkpoint lies; `tensors` maps its name to its file's name and its place there."""

    directory: Path
    files: tuple[str, ...]
    """The weight files' names, sorted."""
    tensors: Mapping[str, tuple[str, Tensor]]


def open_source(directory: Path, files: Collection[str] | None = None) -> Source:
    """The checkpoint in `directory`, checked as vLLM would read it; `files` names the entries that count.

    Raises DuopackError when a file is cut off, the index disagrees, or the checkpoint is split already.
    """
    names = check_weights(directory, load_format="auto", tensor_parallel=1, files=files).files
    tensors = {
        tensor: (name, place)
        for name in names
        for tensor, place in read_header(directory / name).tensors.items()
    }
    return Source(directory, names, tensors)


class Reader:
    """Reads parts of a source's files into given memory."""

    def __init__(self, directory: Path, handles: Mapping[str, int]) -> None:
        self._directory = directory
        self._handles = handles

    def fill(self, room: memoryview, file: str, offset: int) -> None:
        """Fills all of `room` from `offset` on, in bytes. Raises DuopackError when the file ends before."""
        while room:
            count = os.preadv(self._handles[file], [room], offset)
            if not count:
                raise changed(self._directory / file)
            room, offset = room[count:], offset + count


@contextmanager
def reading(source: Source) -> Iterator[Reader]:
    """A reader for as long as the block runs; afterwards no file may have changed since it was opened."""
    handles: dict[str, int] = {}
    try:
        for name in source.files:
            handles[name] = os.open(source.directory / name, os.O_RDONLY | os.O_CLOEXEC)
        before = {name: _identity(os.fstat(handle)) for name, handle in handles.items()}
        yield Reader(source.directory, handles)
        for name, handle in handles.items():
            path = source.directory / name
            if _identity(os.fstat(handle)) != before[name] or _identity(path.stat()) != before[name]:
                raise changed(path)
    finally:
        for handle in handles.values():
            os.close(handle)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def changed(path: Path) -> DuopackError:
    return DuopackError(
        f"'{quoted(path.name)}' changed while it was being read",
        where=str(path.parent),
        mend="let nothing write there, then run the same command again",
    )
