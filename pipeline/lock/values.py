"""The values of models.lock and their JSON form.

The lock names every file of a model by size and sha256, and every base image by digest per platform.
It has no clock, user, host or local path, and its keys are sorted: the same catalog and the same hubs
give the same bytes, and a change reads well as a diff.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.errors import DuopackError, quoted
from pipeline.files import FileRecord, check_relative_path, write_atomically
from pipeline.oci.digest import Digest

VERSION = 1


@dataclass(frozen=True)
class LockedModel:
    """A model's files, and which source and revision gave them."""

    source: str
    """The source's label, e.g. `modelscope:Qwen/Qwen3.5-9B@master`; `dir` for a directory."""
    commit: str | None
    """The commit that the revision stood for, where the hub tells it (Hugging Face does, ModelScope does not)."""
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
                        {"path": file.path, "size": file.size, "sha256": file.sha256} for file in sorted(model.files)
                    ],
                }
                for key, model in self.models.items()
            },
        }
        return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def read_lock(path: Path) -> Lock:
    """Reads models.lock; a missing file is an empty lock. Raises DuopackError when it cannot be understood."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Lock()
    try:
        value = json.loads(data)
        if value.get("version") != VERSION:
            raise DuopackError(
                f"it has version {quoted(str(value.get('version')))}, this duopack reads version {VERSION}",
                where=str(path),
                mend="install the duopack that wrote it, or delete it and run 'duopack lock'",
            )
        return Lock(
            bases={key: _base(entry) for key, entry in value["bases"].items()},
            models={key: _model(entry, str(path)) for key, entry in value["models"].items()},
        )
    except DuopackError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DuopackError(
            f"this is not a lock file ({type(error).__name__}: {quoted(str(error))})",
            where=str(path),
            mend="restore it from version control, or delete it and run 'duopack lock'",
        ) from error


def write_lock(path: Path, lock: Lock) -> None:
    """Writes models.lock atomically."""
    write_atomically(path, lock.to_bytes())


def _base(entry: dict[str, Any]) -> LockedBase:
    return LockedBase(
        images=tuple(str(image) for image in entry["images"]),
        digest=Digest(entry["digest"]),
        platforms={str(name): Digest(digest) for name, digest in entry["platforms"].items()},
    )


def _model(entry: dict[str, Any], where: str) -> LockedModel:
    files = []
    for item in entry["files"]:
        size, sha256 = item["size"], item["sha256"]
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ValueError(f"size {size!r}")
        files.append(
            FileRecord(check_relative_path(item["path"], where=where), size, Digest(f"sha256:{sha256}").hex)
        )
    commit = entry["commit"]
    return LockedModel(
        source=str(entry["source"]),
        commit=None if commit is None else str(commit),
        wanted=str(entry["wanted"]),
        files=tuple(sorted(files)),
    )
