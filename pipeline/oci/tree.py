"""The file tree that a container of an image sees, and the files that are in its layers but not in its tree.

Facts: image-spec, layer.md: a later layer's entry replaces an earlier one, `.wh.NAME` removes NAME, `.wh..wh..opq`
all that lower layers have in its directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pipeline.oci.contents import LayerContents
from pipeline.oci.tarindex import Member

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
MAX_LINKS = 16


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the tree and the number of the layer that it comes from."""

    member: Member
    layer: int


@dataclass(frozen=True, slots=True)
class Hidden:
    """A file in a layer that no container sees: replaced or removed by a later layer."""

    path: str
    size: int
    layer: int
    by: int
    how: Literal["replaced", "removed"]


@dataclass(frozen=True)
class Tree:
    """The visible entries by path, and the hidden files."""

    entries: dict[str, Entry]
    hidden: tuple[Hidden, ...] = ()

    def resolve(self, path: str) -> Entry | None:
        """The entry that a path leads to, links followed; None when there is none, or the links go round."""
        for _ in range(MAX_LINKS):
            entry = self.entries.get(path)
            if entry is None:
                if (linked := self._through_linked_directory(path)) is None:
                    return None
                path = linked
            elif entry.member.kind == "symlink":
                path = joined(path.rpartition("/")[0], entry.member.link)
            elif entry.member.kind == "hardlink":
                path = joined("", entry.member.link)
            else:
                return entry
        return None

    def children(self, directory: str) -> list[str]:
        """The names in a directory, sorted."""
        return self._children.get(directory, [])

    def files(self) -> Iterator[tuple[str, Entry]]:
        """Every regular file, sorted by path."""
        for path in sorted(self.entries):
            if self.entries[path].member.kind == "file":
                yield path, self.entries[path]

    @cached_property
    def _children(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for path in sorted(self.entries):
            folder, _, name = path.rpartition("/")
            if name:
                found.setdefault(folder, []).append(name)
        return found

    def _through_linked_directory(self, path: str) -> str | None:
        """The path with the first part replaced that is a link to a directory."""
        for parent in parents(path):
            entry = self.entries.get(parent)
            if entry and entry.member.kind == "symlink":
                return joined(joined(parent.rpartition("/")[0], entry.member.link), path[len(parent) + 1 :])
        return None


def build_tree(layers: Sequence[LayerContents]) -> Tree:
    """The tree of the members that are known, the layers bottom first."""
    entries: dict[str, Entry] = {}
    hidden: list[Hidden] = []
    removed: dict[str, int] = {}
    opaque: dict[str, int] = {}
    # From the top down: what a later layer has or removes is known before the earlier one is met.
    for layer in reversed(layers):
        own_removed: dict[str, int] = {}
        own_opaque: dict[str, int] = {}
        seen: dict[str, Member] = {}
        for member in layer.members:
            folder, _, name = member.path.rpartition("/")
            if name == _OPAQUE:
                own_opaque[folder] = layer.number
            elif name.startswith(_WHITEOUT):
                own_removed[joined(folder, name.removeprefix(_WHITEOUT))] = layer.number
            else:
                # Twice in one layer: the later one is unpacked over the earlier.
                seen[member.path] = member
        for path, member in seen.items():
            if (by := _remover(path, removed, opaque, entries)) is not None:
                if member.kind == "file" and member.size:
                    hidden.append(Hidden(path, member.size, layer.number, by, "removed"))
            elif above := entries.get(path):
                if member.kind == "file" and member.size:
                    hidden.append(Hidden(path, member.size, layer.number, above.layer, "replaced"))
            else:
                entries[path] = Entry(member, layer.number)
        removed |= own_removed
        opaque |= own_opaque
    return Tree(entries, tuple(sorted(hidden, key=lambda one: (-one.size, one.path, one.layer))))


def _remover(
    path: str, removed: dict[str, int], opaque: dict[str, int], entries: dict[str, Entry]
) -> int | None:
    """The later layer that removes a path, or a directory above it, or puts a file in such a directory's place."""
    if path in removed:
        return removed[path]
    for parent in parents(path):
        if parent in removed or parent in opaque:
            return removed.get(parent, opaque.get(parent))
        above = entries.get(parent)
        if above and above.member.kind not in {"directory", "symlink"}:
            return above.layer
    return opaque.get("") if path else None


def parents(path: str) -> Iterator[str]:
    """The directories above a path, the highest first, without the root."""
    position = path.find("/")
    while position >= 0:
        yield path[:position]
        position = path.find("/", position + 1)


def joined(folder: str, link: str) -> str:
    """Where a link in a folder leads, as the kernel sees it inside the root: nothing is above the root."""
    parts: list[str] = [] if link.startswith("/") else [part for part in folder.split("/") if part]
    for part in link.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in {"", "."}:
            parts.append(part)
    return "/".join(parts)


def leaves_root(folder: str, link: str) -> bool:
    """Whether a relative link goes above the root on its way: a program that unpacks elsewhere would follow it out."""
    if link.startswith("/"):
        return False
    depth = len([part for part in folder.split("/") if part])
    for part in link.split("/"):
        depth += -1 if part == ".." else 0 if part in {"", "."} else 1
        if depth < 0:
            return True
    return False
