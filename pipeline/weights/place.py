"""What checks of weights need of a directory or file: `pathlib.Path` has it, and so has the inside of an image."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Literal, Protocol, Self


class Status(Protocol):
    """What is known of a file without reading it."""

    @property
    def st_size(self) -> int: ...


class Place(Protocol):
    """A directory, or a file in one; `str()` is what a person calls it."""

    @property
    def name(self) -> str: ...

    def __truediv__(self, key: str, /) -> Self: ...

    def iterdir(self) -> Iterator[Self]: ...

    def is_file(self) -> bool: ...

    def stat(self) -> Status: ...

    def open(self, mode: Literal["rb"]) -> IO[bytes]:
        """The file, to read parts of; only what is read has a cost."""
        ...

    def read_bytes(self) -> bytes: ...
