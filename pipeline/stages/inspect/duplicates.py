"""The same content at several paths of an image: proved by sha256 when every byte was read, else by samples."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.errors import DuopackError
from pipeline.oci.limits import LimitError
from pipeline.stages.inside.image import Inside

SMALLEST = 1 << 20
"""Files from this size in bytes are worth finding twice."""
SAMPLE = 64 << 10
MAX_SAMPLED = 500


@dataclass(frozen=True)
class Duplicate:
    """Files with one content. `proved` by their sha256; else their sizes, first, middle and last bytes are alike."""

    paths: tuple[str, ...]
    size: int
    proved: bool

    @property
    def waste(self) -> int:
        """Bytes that one copy would save."""
        return self.size * (len(self.paths) - 1)


def duplicates(inside: Inside) -> tuple[Duplicate, ...]:
    """The duplicates above the base, the most wasteful first."""
    by_size: dict[int, list[str]] = defaultdict(list)
    for path, entry in inside.tree.files():
        if entry.layer >= inside.base.count and entry.member.size >= SMALLEST:
            by_size[entry.member.size].append(path)
    found = [
        Duplicate(tuple(paths), size, proved)
        for size, alike in by_size.items()
        if len(alike) > 1
        for proved, paths in _groups(inside, alike[:MAX_SAMPLED])
    ]
    return tuple(sorted(found, key=lambda one: (-one.waste, one.paths)))


def _groups(inside: Inside, paths: list[str]) -> Iterator[tuple[bool, list[str]]]:
    groups: dict[tuple[bool, str], list[str]] = defaultdict(list)
    for path in paths:
        if identity := _identity(inside, path):
            groups[identity].append(path)
    for (proved, _), alike in groups.items():
        if len(alike) > 1:
            yield proved, alike


def _identity(inside: Inside, path: str) -> tuple[bool, str] | None:
    entry = inside.tree.entries[path]
    if sha256 := inside.layers[entry.layer].hashes.get(path):
        return True, sha256
    sample = sampled(inside, path)
    return (False, sample) if sample else None


def sampled(inside: Inside, path: str) -> str | None:
    """A digest of a file's first, middle and last bytes; None when they cannot be had without reading all."""
    size = inside.tree.entries[path].member.size
    digest = hashlib.sha256()
    try:
        for offset in sorted({0, max(0, size // 2 - SAMPLE // 2), max(0, size - SAMPLE)}):
            wanted = min(SAMPLE, size - offset)
            piece = inside.reading.read(path, inside.tree.entries[path], offset, wanted)
            if len(piece) < wanted:
                return None
            digest.update(piece)
    except DuopackError as error:
        if isinstance(error, LimitError):
            raise
        return None
    finally:
        inside.reading.release()
    return digest.hexdigest()
