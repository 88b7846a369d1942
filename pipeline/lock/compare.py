"""What moved between two entries of a lock, as lines that a reviewer reads like a diff."""

from __future__ import annotations

from pipeline.errors import quoted
from pipeline.files import FileRecord, human_size
from pipeline.lock.values import Lock, LockedBase, LockedModel

SHOWN = 12
"""Hex digits shown of a digest or a commit: enough to look it up."""


def model_changes(old: LockedModel | None, new: LockedModel) -> tuple[str, ...]:
    """`+ path size`, `- path size`, `~ path sha256 a… → b…`, and the source or commit; empty when equal."""
    if old is None:
        return (f"{new.source}{_at(new)}, {_count(new)}",)
    lines = []
    if old.source != new.source:
        lines.append(f"source {quoted(old.source)}{_at(old)} → {quoted(new.source)}{_at(new)}")
    elif old.commit != new.commit:
        lines.append(f"commit {_short(old.commit)} → {_short(new.commit)}")
    return (*lines, *file_changes(old.files, new.files))


def file_changes(old: tuple[FileRecord, ...], new: tuple[FileRecord, ...]) -> tuple[str, ...]:
    """The difference between two file lists, in path order."""
    before, after = ({file.path: file for file in files} for files in (old, new))
    changes = (_file_change(before.get(path), after.get(path)) for path in sorted({*before, *after}))
    return tuple(line for line in changes if line)


def _file_change(old: FileRecord | None, new: FileRecord | None) -> str:
    if old is None and new is not None:
        return f"+ {quoted(new.path)} {human_size(new.size)}"
    if new is None and old is not None:
        return f"- {quoted(old.path)} {human_size(old.size)}"
    if old is None or new is None or old == new:
        return ""
    size = f", {old.size:,} → {new.size:,} bytes" if old.size != new.size else ""
    return f"~ {quoted(new.path)} sha256 {_short(old.sha256)} → {_short(new.sha256)}{size}"


def base_changes(old: LockedBase | None, new: LockedBase) -> tuple[str, ...]:
    """The references, the tag's digest and each platform's digest that moved; empty when equal."""
    if old is None:
        return (f"{new.images[0]} is {new.digest}", *(f"+ {name} {digest}" for name, digest in _sorted(new)))
    lines = [f"- {image}" for image in old.images if image not in new.images]
    lines += [f"+ {image}" for image in new.images if image not in old.images]
    if old.images != new.images and not lines:
        lines.append("the order of its images changed")
    if old.digest != new.digest:
        lines.append(f"tag moved {_short(old.digest.hex)} → {_short(new.digest.hex)}")
    for platform in sorted({*old.platforms, *new.platforms}):
        before, after = old.platforms.get(platform), new.platforms.get(platform)
        if before is None or after is None:
            lines.append(f"{'-' if after is None else '+'} {platform} {after or before}")
        elif before != after:
            lines.append(f"~ {platform} {_short(before.hex)} → {_short(after.hex)}")
    return tuple(lines)


def lock_changes(old: Lock, new: Lock) -> tuple[str, ...]:
    """Everything that differs between two locks, each entry's lines below its name."""
    lines: list[str] = []
    for key in sorted({*old.bases, *new.bases}):
        base = new.bases.get(key)
        lines += _entry(f"base {key}", base_changes(old.bases.get(key), base) if base else None)
    for key in sorted({*old.models, *new.models}):
        model = new.models.get(key)
        lines += _entry(f"model {key}", model_changes(old.models.get(key), model) if model else None)
    return tuple(lines)


def _entry(name: str, changes: tuple[str, ...] | None) -> list[str]:
    if changes is None:
        return [f"{name}: removed"]
    return [name, *(f"  {change}" for change in changes)] if changes else []


def _sorted(base: LockedBase) -> list[tuple[str, str]]:
    return sorted(base.platforms.items())


def _at(model: LockedModel) -> str:
    return f" at {_short(model.commit)}" if model.commit else ""


def _short(text: str | None) -> str:
    return f"{quoted(text[:SHOWN])}…" if text and len(text) > SHOWN else quoted(text or "none")


def _count(model: LockedModel) -> str:
    return f"{len(model.files)} file{'s' if len(model.files) != 1 else ''}, {human_size(model.size)}"
