"""Which files of a listing enter an image, and their sha256 where the hub does not tell it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from pipeline.catalog.schema import Files
from pipeline.errors import DuopackError, quoted
from pipeline.files import FileRecord, check_relative_path, human_size, sha256_file
from pipeline.hubs.faults import read_errors
from pipeline.hubs.hub import Hub, Listing, OnBytes, RemoteFile

DEBRIS = (
    ".msc",
    ".mv",
    ".mdl",
    "._*",
    ".cache",
    "*.incomplete",
    "*.lock",
    ".git*",
    ".DS_Store",
    ".ipynb_checkpoints",
)
"""Names of files and directories that hubs, clients and editors leave in a model; no part of any image."""
OWN = ".duopack-*"
"""What the download stage keeps beside the files."""
MAX_UNHASHED = 256 << 20
"""Bytes of files that are fetched only to be hashed; hubs tell the sha256 of everything large."""


def select(listing: Listing, files: Files, *, where: str) -> Listing:
    """The files that the catalog's patterns choose, sorted, without debris; every name is safe to use.

    `where` names the model in errors. Raises DuopackError for an unsafe name, two names that differ only by
    case, a pattern of `include` that matches nothing, or nothing left.
    """
    candidates = [file for file in listing.files if not is_debris(file.path)]
    for file in candidates:
        check_relative_path(file.path, where=where)
    _require_matches(candidates, files, where)
    chosen = sorted(file for file in candidates if _chosen(file.path, files))
    if not chosen:
        raise DuopackError(
            f"no file is left of the {len(candidates)} that the source has: the exclude patterns "
            f"{', '.join(files.exclude)} take all of them",
            where=where,
            mend="change files: include and exclude in models.yaml",
        )
    _require_distinct(chosen, where)
    return Listing(listing.commit, tuple(chosen))


def is_debris(path: str) -> bool:
    """Whether any part of the path is named as debris is."""
    return any(fnmatchcase(part, pattern) for part in path.split("/") for pattern in (*DEBRIS, OWN))


def complete(listing: Listing, hub: Hub, on_bytes: OnBytes | None = None) -> tuple[FileRecord, ...]:
    """The listing as file records, sorted; a file whose sha256 the hub does not tell is hashed.

    In a directory that is every file, read in place. Hugging Face tells none for small files (those outside
    LFS): they are fetched for it. `on_bytes` is told what is hashed or fetched. Raises DuopackError when the
    files to fetch exceed 256 MiB together, or a file has another size than the listing says.
    """
    unknown = [FileRecord(file.path, file.size, "") for file in listing.files if file.sha256 is None]
    hashes = _hash_unknown(unknown, hub, on_bytes or _ignore)
    return tuple(
        sorted(FileRecord(file.path, file.size, file.sha256 or hashes[file.path]) for file in listing.files)
    )


def _hash_unknown(files: Sequence[FileRecord], hub: Hub, on_bytes: OnBytes) -> dict[str, str]:
    if not files or hub.location:
        return _hash_below(hub.location or Path(), files, on_bytes)
    total = sum(file.size for file in files)
    if total > MAX_UNHASHED:
        largest = max(files, key=lambda file: file.size)
        raise DuopackError(
            f"the hub tells no sha256 for {len(files)} files of {human_size(total)} together, e.g. "
            f"'{quoted(largest.path)}': too much to fetch only for hashing",
            mend="take the model from another source, or download it and use it as dir:",
        )
    with tempfile.TemporaryDirectory(prefix="duopack-") as directory:
        hub.fetch(files, Path(directory), on_bytes)
        return _hash_below(Path(directory), files, _ignore)


def _hash_below(directory: Path, files: Sequence[FileRecord], on_bytes: OnBytes) -> dict[str, str]:
    """The sha256 of each file, several at a time; hashing frees the interpreter, so threads are enough."""

    def one(file: FileRecord) -> tuple[str, str]:
        path, read = directory / file.path, [0]

        def count(size: int) -> None:
            read[0] += size
            on_bytes(file.path, size)

        with read_errors(path):
            digest = sha256_file(path, count)
        if read[0] != file.size:
            raise DuopackError(
                f"it was listed with {file.size} bytes, but has {read[0]}",
                where=quoted(file.path),
                mend="run the same command again; if it stays so, take the model from another source",
            )
        return file.path, digest

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return dict(pool.map(one, files))


def _ignore(path: str, count: int) -> None:
    """Progress that nobody wants to see."""


def _chosen(path: str, files: Files) -> bool:
    included = any(fnmatchcase(path, pattern) for pattern in files.include)
    return included and not any(fnmatchcase(path, pattern) for pattern in files.exclude)


def _require_matches(candidates: Sequence[RemoteFile], files: Files, where: str) -> None:
    idle = [
        pattern
        for pattern in files.include
        if not any(fnmatchcase(file.path, pattern) for file in candidates)
    ]
    if idle:
        examples = ", ".join(quoted(file.path) for file in candidates[:5]) or "none"
        raise DuopackError(
            f"the include pattern {', '.join(map(repr, idle))} matches none of the files, e.g. {examples}",
            where=where,
            mend="correct files: include in models.yaml; patterns match the whole path",
        )


def _require_distinct(chosen: Sequence[RemoteFile], where: str) -> None:
    seen: dict[str, str] = {}
    for file in chosen:
        folded = file.path.casefold()
        if folded in seen:
            raise DuopackError(
                f"'{quoted(seen[folded])}' and '{quoted(file.path)}' differ only by case",
                where=where,
                mend="exclude one of them by pattern: on some disks one would overwrite the other",
            )
        seen[folded] = file.path
    for folded, path in seen.items():
        above = next((seen[one] for one in _directories(folded) if one in seen), None)
        if above is not None:
            raise DuopackError(
                f"'{quoted(above)}' is a file, and '{quoted(path)}' would lie inside of it",
                where=where,
                mend="exclude one of them by pattern, or take the model from another source",
            )


def _directories(path: str) -> list[str]:
    return [parent.as_posix() for parent in PurePosixPath(path).parents if parent.name]
