"""What every hub does: list a model's files, and fetch some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.files import FileRecord

OnBytes = Callable[[str, int], None]
"""Told a file's path and how many bytes more of it are there; fewer than zero when a file starts again."""


@dataclass(frozen=True, order=True)
class RemoteFile:
    """A file as a hub lists it: path in the model, size in bytes, sha256 in hex where the hub tells it."""

    path: str
    size: int
    sha256: str | None


@dataclass(frozen=True)
class Listing:
    """A model's files at one moment, and the commit they belong to where the hub has one."""

    commit: str | None
    files: tuple[RemoteFile, ...]


class Hub(Protocol):
    """A model at one revision of one hub. Failures are DuopackErrors that say what to do."""

    @property
    def location(self) -> Path | None:
        """The directory whose files are used in place; None when they must be fetched."""
        ...

    def listing(self) -> Listing:
        """All files, unfiltered and untrusted."""
        ...

    def fetch(self, files: Sequence[FileRecord], directory: Path, on_bytes: OnBytes) -> None:
        """Puts the files below `directory`, several at once; goes on with what is there where the client can.

        Sizes are checked where the hub states them; the sha256 is for the caller to check.
        """
        ...

    def read_range(self, path: str, first: int, length: int) -> bytes:
        """Part of a file: `length` bytes from `first` on, fewer only where the file ends."""
        ...
