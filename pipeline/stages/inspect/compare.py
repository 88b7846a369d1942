"""Two images: what differs, and what an update from the first to the second would transfer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.oci.tree import Entry
from pipeline.stages.inside.image import Inside
from pipeline.stages.inspect.duplicates import sampled

Change = Literal["added", "removed", "changed", "unknown"]
_SETTINGS = (
    "Entrypoint",
    "Cmd",
    "WorkingDir",
    "User",
    "ExposedPorts",
    "Healthcheck",
    "StopSignal",
    "Volumes",
)


@dataclass(frozen=True)
class Setting:
    """A setting of the config that differs; None where an image does not have it."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class FileChange:
    """A file or link that differs; sizes in bytes. `unknown`: of one size, and only --deep can compare them."""

    path: str
    change: Change
    before: int | None = None
    after: int | None = None
    what: str = ""


@dataclass(frozen=True)
class Transfer:
    """What an update to the second image moves, in bytes and layers, for one who has the first.

    A registry and containerd go by digest; Docker's classic store keeps a layer only where all below it is the same.
    """

    layers: int
    size: int
    docker_layers: int
    docker_size: int


@dataclass(frozen=True)
class Comparison:
    """The first image against the second. `same` when it is one image."""

    before: str
    after: str
    same: bool
    shared_layers: int
    shared_size: int
    gone_layers: tuple[int, ...]
    """Numbers of layers in the first that the second does not have; and the other way round."""
    new_layers: tuple[int, ...]
    transfer: Transfer
    settings: tuple[Setting, ...]
    files: tuple[FileChange, ...]
    unread: bool
    """Whether layers that differ were not looked into, so that files in them are not in `files`."""


def compare(before: Inside, after: Inside) -> Comparison:
    """What changes from `before` to `after`."""
    old = {layer.descriptor.digest: layer.descriptor.size for layer in before.layers}
    new = {layer.descriptor.digest: layer.descriptor.size for layer in after.layers}
    differing = [layer for layer in before.layers if layer.descriptor.digest not in new]
    differing += [layer for layer in after.layers if layer.descriptor.digest not in old]
    return Comparison(
        before=before.digest,
        after=after.digest,
        same=before.digest == after.digest,
        shared_layers=len(old.keys() & new.keys()),
        shared_size=sum(old[digest] for digest in old.keys() & new.keys()),
        gone_layers=tuple(one.number for one in before.layers if one.descriptor.digest not in new),
        new_layers=tuple(one.number for one in after.layers if one.descriptor.digest not in old),
        transfer=_transfer(before, after),
        settings=tuple(_settings(before, after)),
        files=tuple(_files(before, after)),
        unread=any(not layer.complete for layer in differing),
    )


def _transfer(before: Inside, after: Inside) -> Transfer:
    have = {layer.descriptor.digest for layer in before.layers}
    wanted = {
        one.descriptor.digest: one.descriptor.size
        for one in after.layers
        if one.descriptor.digest not in have
    }
    alike = 0
    for old, new in zip(before.layers, after.layers, strict=False):
        if old.descriptor.digest != new.descriptor.digest:
            break
        alike += 1
    above = {one.descriptor.digest: one.descriptor.size for one in after.layers[alike:]}
    return Transfer(len(wanted), sum(wanted.values()), len(above), sum(above.values()))


def _settings(before: Inside, after: Inside) -> Iterator[Setting]:
    pairs: list[tuple[str, Any, Any]] = [("platform", before.platform, after.platform)]
    pairs += [(name, before.settings.get(name), after.settings.get(name)) for name in _SETTINGS]
    for kind, old, new in (("Env", before.env, after.env), ("Labels", before.labels, after.labels)):
        pairs += [
            (f"{kind}.{name}", old.get(name), new.get(name)) for name in sorted(old.keys() | new.keys())
        ]
    yield from (Setting(name, old, new) for name, old, new in pairs if old != new)


def _files(before: Inside, after: Inside) -> Iterator[FileChange]:
    old, new = before.tree.entries, after.tree.entries
    for path in sorted(old.keys() | new.keys()):
        one, other = old.get(path), new.get(path)
        if one is None:
            assert other is not None
            if other.member.kind != "directory":
                yield FileChange(path, "added", None, other.member.size)
        elif other is None:
            if one.member.kind != "directory":
                yield FileChange(path, "removed", one.member.size, None)
        elif change := _changed(before, after, path, one, other):
            yield FileChange(path, change[0], one.member.size, other.member.size, change[1])


def _changed(before: Inside, after: Inside, path: str, one: Entry, other: Entry) -> tuple[Change, str] | None:
    """How an entry differs, and in what; None when it does not."""
    a, b = one.member, other.member
    if a.kind != b.kind:
        return "changed", f"{a.kind} → {b.kind}"
    if a.link != b.link:
        return "changed", f"link {a.link} → {b.link}"
    layers = before.layers[one.layer], after.layers[other.layer]
    if layers[0].descriptor.digest == layers[1].descriptor.digest and a.offset == b.offset:
        return None
    mode = f"mode {a.mode:04o} → {b.mode:04o}" if a.mode != b.mode else ""
    if a.kind != "file":
        return ("changed", mode) if mode else None
    if a.size != b.size:
        return "changed", mode
    hashes = layers[0].hashes.get(a.path), layers[1].hashes.get(b.path)
    if None not in hashes:
        return ("changed", mode) if hashes[0] != hashes[1] or mode else None
    samples = sampled(before, path), sampled(after, path)
    if None in samples:
        return "unknown", mode
    if samples[0] != samples[1]:
        return "changed", mode
    return ("changed", mode) if mode else None
