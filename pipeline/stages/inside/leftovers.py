"""What hubs, clients and editors leave in an image: found by name, and weighed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.hubs.selection import is_debris
from pipeline.stages.inside.image import Inside
from pipeline.stages.inside.models import ModelDirectory

CACHES = re.compile(
    r"(?:.*?/)??(?:\.cache/(?:huggingface|modelscope|pip)|models--[^/]+/(?:blobs|refs|\.no_exist)|\._____temp|\.git)(?=/|\Z)"
)
"""Directories that no server reads: hubs' caches, half-finished downloads, version control."""
PARTIAL = re.compile(r"(?:.*/)?[^/]+\.(?:incomplete|partial|aria2|tmp)")


@dataclass(frozen=True)
class Leftover:
    """Files of one kind under one path (without a leading slash); size in bytes."""

    path: str
    files: int
    size: int


def leftovers(inside: Inside, models: Iterable[ModelDirectory]) -> tuple[Leftover, ...]:
    """Leftovers above the base, the heaviest first."""
    folders = tuple(f"{model.path}/" for model in models if model.path)
    found: dict[str, tuple[int, int]] = {}
    for path, entry in inside.tree.entries.items():
        if entry.layer < inside.base.count or entry.member.kind == "directory":
            continue
        if place := _place(path, folders):
            files, size = found.get(place, (0, 0))
            found[place] = (files + 1, size + entry.member.size)
    return tuple(
        sorted(
            (Leftover(path, files, size) for path, (files, size) in found.items()),
            key=lambda one: (-one.size, one.path),
        )
    )


def _place(path: str, folders: tuple[str, ...]) -> str | None:
    """The directory or file to name, when a path is a leftover."""
    if match := CACHES.match(path):
        return match[0]
    if PARTIAL.fullmatch(path):
        return path
    folder = next((one for one in folders if path.startswith(one)), None)
    if folder is None or not is_debris(path[len(folder) :]):
        return None
    # The whole of a directory that is debris is named once.
    parts = path[len(folder) :].split("/")
    depth = next(number for number, part in enumerate(parts) if is_debris(part))
    return folder + "/".join(parts[: depth + 1])
