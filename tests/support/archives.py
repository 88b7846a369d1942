"""Tar archives that the tests made themselves."""

from __future__ import annotations

import tarfile
from pathlib import Path


def untar(archive: Path, directory: Path) -> Path:
    """Unpacks an archive, whatever its compression; returns the directory.

    Python before 3.11.4, which Debian 12 has, knows no filters.
    """
    with tarfile.open(archive) as opened:
        if hasattr(tarfile, "data_filter"):
            opened.extractall(directory, filter="data")
        else:
            opened.extractall(directory)
    return directory
