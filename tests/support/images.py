"""Images to look into, in memory: ours as a build makes them, others as `docker build` does, and hostile ones."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.launching import OLD_BASE, model, profile
from support.oci_memory import Bytes, MemorySink, MemorySource, base_config, small_base

from pipeline.demo.model import make_model
from pipeline.files import FileRecord, sha256_file
from pipeline.lock.values import Lock, LockedBase, LockedModel
from pipeline.oci.digest import Digest
from pipeline.oci.image import Layer, load_base
from pipeline.oci.model import OCI_CONFIG, OCI_LAYER_GZIP, OCI_LAYER_TAR, OCI_MANIFEST
from pipeline.oci.tar import TarEntry, TarLayer
from pipeline.oci.transfer import write_image
from pipeline.stages.launch import launch_files

TAG = "t"
DIRECTORY = "models/Tiny"
Files = Mapping[str, bytes]


def tar_of(files: Files) -> bytes:
    """A tar of files."""
    return tar_with(*((member(name), data) for name, data in files.items()))


def tar_with(*infos: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]) -> bytes:
    """A tar of any members."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for one in infos:
            info, data = one if isinstance(one, tuple) else (one, b"")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, **more: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in more.items():
        setattr(info, key, value)
    return info


def image_of(
    *layers: bytes | tuple[bytes, bytes],
    source: MemorySource | None = None,
    settings: Mapping[str, Any] | None = None,
    **config: Any,
) -> MemorySource:
    """An image of layers: a tar, or (blob, what it unpacks to). `settings` changes `config` of its config."""
    source = source or MemorySource()
    pairs = [one if isinstance(one, tuple) else (one, one) for one in layers]
    diff_ids = ["sha256:" + hashlib.sha256(plain).hexdigest() for _, plain in pairs]
    document = base_config(diff_ids, history=[], **config)
    document["config"] = {"Cmd": ["bash"]} | dict(settings or {})
    source.add_manifest(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": source.add_blob(json.dumps(document).encode(), OCI_CONFIG),
            "layers": [
                source.add_blob(blob, OCI_LAYER_GZIP if blob[:2] == b"\x1f\x8b" else OCI_LAYER_TAR)
                for blob, _ in pairs
            ],
        },
        TAG,
    )
    return source


def gzipped(tar: bytes) -> tuple[bytes, bytes]:
    return gzip.compress(tar, 1, mtime=0), tar


def weights_of(names: Sequence[str] = ("a", "b"), size: int = 64, dtype: str = "U8") -> bytes:
    """A safetensors file."""
    header, end = {}, 0
    for name in names:
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


def model_files(directory: Path) -> dict[str, bytes]:
    """The demo's tiny model, as files."""
    if not directory.exists():
        make_model(directory)
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def our_image(
    files: Files,
    *,
    change_files: Callable[[dict[str, tuple[int, bytes]]], None] = lambda _: None,
    change_config: Callable[[dict[str, Any]], None] = lambda _: None,
    **profile_changes: Any,
) -> MemorySource:
    """An image as a build makes it, with a model of these files at models/Tiny.

    `change_files` may change all files above the base, by path to (mode, bytes), and `change_config` the config.
    """
    source = MemorySource()
    small_base(source, "base")
    base = load_base(source, "base", "linux/arm64")
    one = model(profile(**profile_changes), title="Tiny", directory="Tiny")
    launch = launch_files({"tiny": one}, OLD_BASE, str(base.base_digest), "n9")
    contents = {f"{DIRECTORY}/{name}": (0o644, data) for name, data in files.items()}
    contents |= {path: (mode, data) for path, mode, data in launch.files}
    change_files(contents)
    groups = {"weights": {}, "start scripts": {}}
    for path, (mode, data) in contents.items():
        groups["start scripts" if path.startswith(("models/scripts", "models/launch")) else "weights"][
            path
        ] = mode, data
    image = base.with_layers(
        Layer(_layer(group), created_by=f"duopack: {name}", title=name)
        for name, group in groups.items()
        if group
    ).with_config(
        cmd=launch.command,
        labels=launch.labels,
        healthcheck=launch.healthcheck,
        exposed_ports=launch.exposed_ports,
    )
    document = dict(image.config)
    change_config(document)
    sink = MemorySink()
    write_image(replace(image, config=document), sink)
    assert sink.manifest
    source.blobs |= {str(digest): data for digest, data in sink.blobs.items()}
    source.blobs[Digest.of(sink.config or b"")] = sink.config or b""
    for reference in (TAG, str(Digest.of(sink.manifest))):
        source.manifests[reference] = (OCI_MANIFEST, sink.manifest)
    return source


def _layer(group: Mapping[str, tuple[int, bytes]]) -> Any:
    if all(mode in {0o644, 0o755} for mode, _ in group.values()):
        return TarLayer([TarEntry(path, mode, data) for path, (mode, data) in group.items()])
    return Bytes(tar_with(*((member(path, mode=mode), data) for path, (mode, data) in group.items())))


def lock_of(directory: Path, base: str = "") -> Lock:
    """A lock that holds the model in a directory as 'tiny', and the base with this digest."""
    records = tuple(
        FileRecord(path.name, path.stat().st_size, sha256_file(path)) for path in sorted(directory.iterdir())
    )
    bases = {}
    if base:
        digest = Digest(base)
        bases["b"] = LockedBase(OLD_BASE.images, digest, {"linux/arm64": digest})
    return Lock(bases, {"tiny": LockedModel("dir", None, "", records)})


def base_digest() -> str:
    """The digest of the base that `our_image` builds upon."""
    source = MemorySource()
    small_base(source, "base")
    return str(load_base(source, "base", "linux/arm64").base_digest)
