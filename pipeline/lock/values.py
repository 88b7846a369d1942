"""The values of models.lock and their JSON form.

The lock names every file of a model by size and sha256, and every base image by digest per platform.
It has no clock, user, host or local path, and its keys are sorted: the same catalog and the same hubs
give the same bytes, and a change reads well as a diff.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pipeline.errors import DuopackError, quoted
from pipeline.files import FileRecord, check_relative_path, write_atomically
from pipeline.oci.digest import Digest

VERSION = 1

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class LockedModel:
    """A model's files, and which source and revision gave them."""

    source: str
    """The source's label, e.g. `modelscope:Qwen/Qwen3.5-9B@master`; `dir` for a directory."""
    commit: str | None
    """The commit that the revision stood for; None where the hub does not tell it, as ModelScope."""
    wanted: str
    """Fingerprint of what the catalog asked for (sources and file patterns): another one means stale."""
    files: tuple[FileRecord, ...]
    """Sorted by path."""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class LockedBase:
    """A base image: the digest under its tag and the manifest's digest per platform."""

    images: tuple[str, ...]
    """The catalog's references at the time of locking: others mean stale."""
    digest: Digest
    platforms: dict[str, Digest]


@dataclass(frozen=True)
class Lock:
    """The whole lock; a missing entry is not locked yet."""

    bases: dict[str, LockedBase] = field(default_factory=dict)
    models: dict[str, LockedModel] = field(default_factory=dict)

    def with_model(self, key: str, model: LockedModel) -> Lock:
        return replace(self, models={**self.models, key: model})

    def with_base(self, key: str, base: LockedBase) -> Lock:
        return replace(self, bases={**self.bases, key: base})

    def to_bytes(self) -> bytes:
        value = {
            "version": VERSION,
            "bases": {
                key: {"images": list(base.images), "digest": base.digest, "platforms": base.platforms}
                for key, base in self.bases.items()
            },
            "models": {
                key: {
                    "source": model.source,
                    "commit": model.commit,
                    "wanted": model.wanted,
                    "files": [
                        {"path": file.path, "size": file.size, "sha256": file.sha256}
                        for file in sorted(model.files)
                    ],
                }
                for key, model in self.models.items()
            },
        }
        return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def read_lock(path: Path) -> Lock:
    """Reads models.lock; a missing file is an empty lock. Raises DuopackError when it is not sound."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Lock()
    except OSError as error:
        raise DuopackError(
            f"it cannot be read: {error.strerror}", where=str(path), mend="check the path and its mode"
        ) from error
    try:
        return _lock(json.loads(data, object_pairs_hook=_unique))
    except _OtherVersionError as error:
        raise DuopackError(
            f"it has version {quoted(str(error))}, this duopack reads version {VERSION}",
            where=str(path),
            mend="install the duopack that wrote it, or delete it and run 'duopack lock'",
        ) from error
    except (ValueError, RecursionError) as error:
        merging = any(line.startswith((b"<<<<<<<", b">>>>>>>")) for line in data.splitlines())
        take = "it has the marks of a merge: take either side whole, then run 'duopack lock'"
        restore = "restore it from version control, or delete it and run 'duopack lock'"
        raise DuopackError(
            f"this is not a sound lock file: {quoted(str(error))}",
            where=str(path),
            mend=take if merging else restore,
        ) from error


def write_lock(path: Path, lock: Lock) -> None:
    """Writes models.lock atomically; a lock that is there already, byte for byte, is not touched."""
    data = lock.to_bytes()
    if not path.is_file() or path.read_bytes() != data:
        write_atomically(path, data)


class _OtherVersionError(Exception):
    """The lock was written by a duopack of another version."""


def _lock(value: Any) -> Lock:
    version = _checked(value, dict, "the file").get("version")
    if version != VERSION or isinstance(version, bool):
        raise _OtherVersionError(version)
    return Lock(
        bases={key: _base(entry, f"bases.{key}") for key, entry in _field(value, "bases", dict, "").items()},
        models={
            key: _model(entry, f"models.{key}") for key, entry in _field(value, "models", dict, "").items()
        },
    )


def _base(entry: Any, at: str) -> LockedBase:
    return LockedBase(
        images=tuple(_checked(image, str, f"{at}.images") for image in _field(entry, "images", list, at)),
        digest=_digest(_field(entry, "digest", str, at), at),
        platforms={
            name: _digest(_checked(digest, str, f"{at}.platforms.{name}"), at)
            for name, digest in _field(entry, "platforms", dict, at).items()
        },
    )


def _model(entry: Any, at: str) -> LockedModel:
    files = tuple(sorted(_file(item, f"{at}.files") for item in _field(entry, "files", list, at)))
    if len({file.path for file in files}) != len(files) or not files:
        raise ValueError(f"{at}.files is empty, or has a path twice")
    return LockedModel(
        source=_field(entry, "source", str, at),
        commit=None if entry.get("commit") is None else _field(entry, "commit", str, at),
        wanted=_field(entry, "wanted", str, at),
        files=files,
    )


def _file(item: Any, at: str) -> FileRecord:
    size = _field(item, "size", int, at)
    if isinstance(size, bool) or size < 0:
        raise ValueError(f"{at} has the size {size!r}")
    try:
        path = check_relative_path(_field(item, "path", str, at), where=at)
    except DuopackError as error:
        raise ValueError(error.what) from error
    return FileRecord(path, size, _digest(f"sha256:{_field(item, 'sha256', str, at)}", at).hex)


def _digest(text: str, at: str) -> Digest:
    try:
        return Digest(text)
    except DuopackError as error:
        raise ValueError(f"in {at} {error.what}") from error


def _field(entry: Any, name: str, kind: type[Kind], at: str) -> Kind:
    found = _checked(entry, dict, at)
    if name not in found:
        raise ValueError(f"{at or 'the file'} has no '{name}'")
    return _checked(found[name], kind, f"{at}.{name}".lstrip("."))


def _checked(value: Any, kind: type[Kind], at: str) -> Kind:
    if not isinstance(value, kind):
        raise ValueError(f"{at} is not {_KINDS[kind]}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is there twice")
    return value


_KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "text", int: "a whole number"}
