"""A model at a hub as a place to read parts of: listed once, read by ranges, nothing kept on a disk."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Literal

from pipeline.errors import DuopackError, quoted
from pipeline.hubs.hub import Hub

AHEAD = 256 << 10
"""Bytes per request at least: most headers fit into one."""
MAX_WHOLE = 100_000_000
"""Bytes of a file that is read whole; weights are not."""


def take_range(status: int, pieces: Iterator[bytes], first: int, length: int) -> bytes:
    """The wanted bytes of an answer: all of it for 206, a part for 200, where the Range was not heeded."""
    skip, data = (0 if status == 206 else first), bytearray()
    for piece in pieces:
        dropped = min(skip, len(piece))
        skip -= dropped
        data += piece[dropped : dropped + length - len(data)]
        if len(data) >= length:
            break
    return bytes(data)


@dataclass(frozen=True)
class _Status:
    st_size: int


@dataclass(frozen=True)
class HubPlace:
    """A directory or a file of a model at a hub; `files` are all its files with their sizes, by path."""

    hub: Hub
    label: str
    files: Mapping[str, int]
    path: str = ""
    _whole: dict[str, bytes] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return f"{self.label}/{self.path}" if self.path else self.label

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def __truediv__(self, key: str) -> HubPlace:
        path = f"{self.path}/{key}" if self.path else key
        return HubPlace(self.hub, self.label, self.files, path, self._whole)

    def iterdir(self) -> Iterator[HubPlace]:
        prefix = f"{self.path}/" if self.path else ""
        below = (path.removeprefix(prefix) for path in self.files if path.startswith(prefix))
        for name in dict.fromkeys(path.partition("/")[0] for path in below):
            yield self / name

    def is_file(self) -> bool:
        return self.path in self.files

    def stat(self) -> _Status:
        return _Status(self._size())

    def open(self, mode: Literal["rb"]) -> IO[bytes]:
        del mode
        return io.BufferedReader(_Ranges(self.hub, self.path, self._size()), AHEAD)

    def read_bytes(self) -> bytes:
        """The whole file, fetched once. Raises DuopackError when it is over 100 MB."""
        size = self._size()
        if size > MAX_WHOLE:
            raise DuopackError(
                f"it has {size} bytes: too many to be read whole", where=str(self), mend="check the model"
            )
        if self.path not in self._whole:
            self._whole[self.path] = self.hub.read_range(self.path, 0, size)
        return self._whole[self.path]

    def _size(self) -> int:
        if self.path not in self.files:
            raise DuopackError(
                f"the model has no file '{quoted(self.path)}'",
                where=self.label,
                mend="check the file patterns",
            )
        return self.files[self.path]


class _Ranges(io.RawIOBase):
    """A file at a hub; each read is a request."""

    def __init__(self, hub: Hub, path: str, size: int) -> None:
        self._hub, self._path, self._size, self._at = hub, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = min(len(buffer), max(0, self._size - self._at))
        data = self._hub.read_range(self._path, self._at, count) if count else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
