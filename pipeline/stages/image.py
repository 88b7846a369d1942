"""The image as a value: the base, one layer per large weight file, small files bundled, the launch layer last.

The launch layer is last and small, so a changed start script re-publishes in a second. Paths inside the
layers depend only on the model, so images with the same model share those layers byte for byte.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.catalog.schema import Model
from pipeline.catalog.target import Target
from pipeline.errors import DuopackError
from pipeline.files import FileRecord, write_atomically
from pipeline.lock.values import LockedModel
from pipeline.oci.digest import Digest
from pipeline.oci.image import Image, Layer
from pipeline.oci.tar import FileContent, StatIdentity, TarEntry, TarLayer, pack
from pipeline.stages.download import Downloaded
from pipeline.stages.launch import LaunchFiles

ROOT = "models"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def plan_image(
    target: Target, base: Image, entries: Mapping[str, Sequence[TarEntry]], launch: LaunchFiles
) -> Image:
    """Adds the models' files (by model key) and the launch files to the base; reads no weights."""
    layers = [
        Layer.of(layer, created_by=f"duopack: {model.title}")
        for key, model in target.models
        for layer in pack(entries[key])
    ]
    scripts = TarLayer([TarEntry(path, mode, data) for path, mode, data in launch.files])
    layers.append(Layer(scripts, created_by="duopack: start scripts", title="start scripts"))
    return base.with_layers(layers).with_config(
        cmd=launch.command,
        env={**launch.env, "PATH": _appended(base.env.get("PATH"), launch.path_append)},
        labels=launch.labels,
        healthcheck=launch.healthcheck,
        exposed_ports=launch.exposed_ports,
    )


def downloaded_entries(model: Model, weights: Downloaded) -> tuple[TarEntry, ...]:
    """A model's verified files as entries under /models/."""
    return tuple(_entry(model, file.record, file.path, file.identity) for file in weights.files)


def locked_entries(model: Model, locked: LockedModel, directory: Path) -> tuple[TarEntry, ...]:
    """The same from the lock alone, for layers that will not be read: `directory` may be empty."""
    return tuple(_entry(model, record, directory / record.path, None) for record in locked.files)


def file_layers(
    model: Model, locked: LockedModel, directory: Path
) -> Iterator[tuple[str, TarLayer, tuple[bytes, bytes]]]:
    """The model's layers that are one file each: the file's path in the model, the layer, its frame."""
    for layer in pack(locked_entries(model, locked, directory)):
        if frame := layer.frame:
            yield layer.entries[0].path.removeprefix(f"{ROOT}/{model.directory}/"), layer, frame


def _entry(model: Model, record: FileRecord, path: Path, identity: StatIdentity | None) -> TarEntry:
    content = FileContent(path, record.size, record.sha256, identity)
    return TarEntry(f"{ROOT}/{model.directory}/{record.path}", 0o644, content)


def _appended(path: str | None, directory: str) -> str:
    parts = (path or DEFAULT_PATH).split(":")
    return ":".join(parts if directory in parts else [*parts, directory])


class LayerMemo:
    """Digests of layers packed before, by `TarLayer.key`, in a JSON file.

    The key covers each entry's path, mode, size and sha256 and the packer's own fingerprint, so an entry
    never goes stale; a lost or damaged file only costs hashing again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mutex = threading.Lock()

    def known(self) -> dict[str, Digest]:
        """What is remembered; what cannot be read is forgotten."""
        try:
            value = json.loads(self._path.read_bytes())
            return {str(key): Digest(digest) for key, digest in value.items()}
        except (OSError, ValueError, AttributeError, TypeError, DuopackError):
            return {}

    def forget(self) -> None:
        """Forgets everything: something remembered was wrong, or hashing again is cheaper than to find out."""
        with suppress(OSError):
            self._path.unlink()

    def remember(self, key: str, digest: Digest) -> None:
        """Adds one; may be called from any thread."""
        with self._mutex:
            data = json.dumps({**self.known(), key: digest}, indent=1, sort_keys=True)
            write_atomically(self._path, data.encode())
