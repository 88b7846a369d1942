"""Several images as one archive that is both Docker's and OCI's: what `docker save` writes since version 25.

`docker load` reads manifest.json or, with containerd's store, index.json; unpacked, it is an OCI image layout. All
digests are known before, so the small documents come first, the whole size is known before a byte is read, and
a reader of the stream knows what is to come. Facts: moby, image/tarexport; image-spec 1.1, image-layout.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipeline.errors import DuopackError, quoted
from pipeline.oci.digest import Digest
from pipeline.oci.documents import Resolved, canonical, config_platform, parse_object, resolve
from pipeline.oci.hashing import Piece, pour
from pipeline.oci.layout import IMAGE_NAME, REF_NAME
from pipeline.oci.model import MAX_CONFIG, OCI_INDEX, Blob, Descriptor, OnBytes, Source
from pipeline.oci.reference import Reference
from pipeline.oci.tar import end, header, padding

_FOLDERS = ("blobs", "blobs/sha256")


@dataclass(frozen=True)
class Chosen:
    """An image that goes into a bundle: where it is read, its documents, and the name it will have."""

    name: Reference
    source: Source
    resolved: Resolved
    config: bytes

    @property
    def digest(self) -> Digest:
        return self.resolved.descriptor.digest

    @property
    def layers(self) -> tuple[Descriptor, ...]:
        return self.resolved.manifest.layers

    @cached_property
    def diff_ids(self) -> tuple[str, ...]:
        """The digests of the uncompressed layers. Raises DuopackError when the config does not tell them."""
        rootfs = parse_object(self.config, where=str(self.name), limit=MAX_CONFIG).get("rootfs")
        found = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
        if not isinstance(found, list) or len(found) != len(self.layers):
            raise DuopackError(
                "the image's config does not tell the diff id of each layer",
                where=str(self.name),
                mend="it is not sound: build it again",
            )
        return tuple(str(one) for one in found)


def choose_image(source: Source, reference: str, platform: str | None, name: Reference) -> Chosen:
    """An image ready to be bundled under a name. Raises DuopackError as `resolve` does."""
    resolved = resolve(source, reference, platform)
    raw = bytearray()
    pour(source.blob(resolved.manifest.config), raw.extend, lambda _: None)
    return Chosen(name, source, resolved, bytes(raw))


@dataclass(frozen=True)
class Bundle:
    """Images in one archive; a blob that several have is there once, and those of `omitted` not at all."""

    images: tuple[Chosen, ...]
    omitted: frozenset[Digest] = frozenset()

    def __post_init__(self) -> None:
        names = [image.name.name_tag for image in self.images]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DuopackError(
                f"two images would have the name '{quoted(twice[0])}'",
                where="export",
                mend="give each a name of its own with --as",
            )

    @property
    def size(self) -> int:
        """Bytes of the whole archive."""
        folders = sum(len(header(folder, mode=0o755, directory=True)) for folder in _FOLDERS)
        files = [(path, len(data)) for path, data in self._documents]
        files += [(_path(layer.digest), layer.size) for layer in self.layers]
        return (
            folders
            + sum(len(header(path, size=size)) + size + -size % 512 for path, size in files)
            + len(end())
        )

    @cached_property
    def layers(self) -> tuple[Descriptor, ...]:
        """The layers that the archive carries, in the order in which it does."""
        found = {layer.digest: layer for image in self.images for layer in image.layers}
        return tuple(layer for digest, layer in found.items() if digest not in self.omitted)

    def write(self, write: Callable[[Piece], object], start: Callable[[Descriptor], OnBytes]) -> None:
        """The archive, piece by piece; each layer is read once and checked. `start` is told of each layer."""
        for folder in _FOLDERS:
            write(header(folder, mode=0o755, directory=True))
        for path, data in self._documents:
            write(header(path, size=len(data)))
            write(data)
            write(padding(len(data)))
        for layer in self.layers:
            write(header(_path(layer.digest), size=layer.size))
            _copy(self._blob(layer), write, start(layer))
            write(padding(layer.size))
        write(end())

    def _blob(self, layer: Descriptor) -> Blob:
        owner = next(image for image in self.images if layer in image.layers)
        return owner.source.blob(layer)

    @cached_property
    def _documents(self) -> tuple[tuple[str, bytes], ...]:
        blobs = {
            _path(Digest.of(data)): data
            for image in self.images
            for data in (image.resolved.data, image.config)
        }
        return (
            ("oci-layout", canonical({"imageLayoutVersion": "1.0.0"})),
            ("index.json", canonical(self._index())),
            ("manifest.json", canonical([_docker_entry(image) for image in self.images])),
            *sorted(blobs.items()),
        )

    def _index(self) -> dict[str, Any]:
        tags = unique_tags([image.name for image in self.images])
        return {
            "schemaVersion": 2,
            "mediaType": OCI_INDEX,
            "manifests": [
                _listed(image, tag).to_json() for image, tag in zip(self.images, tags, strict=True)
            ],
        }


def unique_tags(names: Sequence[Reference]) -> list[str]:
    """A tag for each name by which a layout can tell them apart: the own one, else `<image>-<tag>`."""
    tags = [name.tag or "latest" for name in names]
    if len(set(tags)) == len(tags):
        return tags
    return [f"{name.repository.rpartition('/')[2]}-{tag}" for name, tag in zip(names, tags, strict=True)]


def shared_chain(image: Chosen, others: Iterable[Chosen]) -> int:
    """How many layers, from the bottom, an image has in common with one of the others: what an engine reuses."""

    def common(other: Chosen) -> int:
        pairs = zip(image.diff_ids, other.diff_ids, strict=False)
        return next(
            (number for number, (a, b) in enumerate(pairs) if a != b),
            min(len(image.diff_ids), len(other.diff_ids)),
        )

    return max(map(common, others), default=0)


def needless(images: Sequence[Chosen], others: Sequence[Chosen]) -> frozenset[Digest]:
    """The layers that an engine with `others` does not open: those below which it has the same ones."""
    needless: set[Digest] = set()
    needed: set[Digest] = set()
    for image in images:
        count = shared_chain(image, others)
        needless |= {layer.digest for layer in image.layers[:count]}
        needed |= {layer.digest for layer in image.layers[count:]}
    return frozenset(needless - needed)


def _listed(image: Chosen, tag: str) -> Descriptor:
    found = image.resolved.descriptor
    platform = config_platform(parse_object(image.config, where=str(image.name), limit=MAX_CONFIG))
    full = f"{image.name.registry}/{image.name.repository}:{image.name.tag}"
    return Descriptor(
        image.resolved.manifest.media_type,
        found.digest,
        found.size,
        {REF_NAME: tag, IMAGE_NAME: full},
        platform or None,
    )


def _docker_entry(image: Chosen) -> dict[str, Any]:
    return {
        "Config": _path(Digest.of(image.config)),
        "RepoTags": [image.name.name_tag],
        "Layers": [_path(layer.digest) for layer in image.layers],
    }


def _copy(blob: Blob, write: Callable[[Piece], object], on_bytes: OnBytes) -> None:
    """A layer's bytes, which its source checks against the digest while they are read: no need to hash them twice."""
    count = 0
    for piece in blob.read():
        write(piece)
        count += len(piece)
        on_bytes(len(piece))
    if count != blob.size:
        raise DuopackError(
            f"a layer gave {count} bytes and not the promised {blob.size}", where=str(blob.digest)
        )


def _path(digest: Digest) -> str:
    return f"blobs/sha256/{digest.hex}"
