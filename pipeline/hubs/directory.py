"""A model in a directory: its files are used where they are, never copied, never changed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.errors import DuopackError, quoted
from pipeline.files import FileRecord
from pipeline.hubs.faults import read_errors
from pipeline.hubs.hub import Listing, OnBytes, RemoteFile
from pipeline.hubs.selection import is_debris


class Directory:
    """A directory of the user's; the debris of hubs and editors in it is not looked at."""

    def __init__(self, path: Path) -> None:
        self.location: Path | None = path
        self._path = path

    def listing(self) -> Listing:
        """All files with their sizes; hashing is left to `selection.complete`, for the chosen ones only.

        Raises DuopackError for a symlink, which has no bytes of its own, and for devices, pipes and sockets.
        """
        if not self._path.is_dir():
            raise DuopackError(
                "there is no such directory", where=str(self._path), mend="correct dir: in models.yaml"
            )
        with read_errors(self._path):
            return Listing(None, tuple(sorted(self._walk(self._path))))

    def fetch(self, files: Sequence[FileRecord], directory: Path, on_bytes: OnBytes) -> None:
        """Nothing can be fetched: a file that is not there is missing for good."""
        del directory, on_bytes
        names = ", ".join(quoted(file.path) for file in files[:3])
        raise DuopackError(
            f"{names} {'is' if len(files) == 1 else 'are'} missing or not as locked",
            where=str(self._path),
            mend="put the files back, or run 'duopack lock --update' to take the directory as it is now",
        )

    def read_range(self, path: str, first: int, length: int) -> bytes:
        """Part of a file of the directory."""
        with read_errors(self._path / path), (self._path / path).open("rb") as file:
            file.seek(first)
            return file.read(length)

    def _walk(self, directory: Path) -> Iterator[RemoteFile]:
        for entry in os.scandir(directory):
            relative = Path(entry.path).relative_to(self._path).as_posix()
            if is_debris(relative):
                continue
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                raise DuopackError(
                    f"'{quoted(relative)}' is a symbolic link",
                    where=str(self._path),
                    mend="replace it by the file itself (cp -L), or name the directory of the real files",
                )
            if stat.S_ISDIR(mode):
                yield from self._walk(Path(entry.path))
            elif stat.S_ISREG(mode):
                yield RemoteFile(relative, entry.stat(follow_symlinks=False).st_size, None)
            else:
                raise DuopackError(
                    f"'{quoted(relative)}' is neither a file nor a directory",
                    where=str(self._path),
                    mend="move it elsewhere: a model is made of files",
                )
