"""Images beside a destination, in the same registry, whose layers can be mounted instead of sent.

What a registry says of a layer proves nothing about its content: it only tells which layers are worth looking for.
A layer is taken from a sister by the digest that this project has computed from its own files, now or earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pipeline.catalog.schema import Catalog
from pipeline.catalog.target import Target, build_keys, default_destination, find_target
from pipeline.errors import DuopackError
from pipeline.oci.digest import Digest
from pipeline.oci.documents import Index, Manifest, parse_document
from pipeline.oci.hashing import pour
from pipeline.oci.image import Image
from pipeline.oci.model import Descriptor, Source
from pipeline.oci.places import open_source
from pipeline.oci.reference import Reference, parse_reference
from pipeline.oci.tar import TarLayer
from pipeline.reports.progress import Progress
from pipeline.settings import Settings

if TYPE_CHECKING:
    from pipeline.stages.image import LayerMemo

_AT_ONCE = 4
_MAX_PLATFORMS = 8


@dataclass(frozen=True)
class Sisters:
    """The layers of `candidates`, images that may exist; they are asked for only when something is missing.

    The destination counts too: an image that is there already tells which layers are worth looking for.
    """

    destination: Reference
    candidates: tuple[Reference, ...]

    @property
    def repositories(self) -> tuple[str, ...]:
        """The repositories of the destination's registry that are looked at, without its own."""
        found = dict.fromkeys(one.repository for one in self.candidates)
        return tuple(one for one in found if one != self.destination.repository)

    def holding(self, digest: Digest) -> tuple[str, ...]:
        """The repositories of which an image names a blob."""
        found = dict.fromkeys(one.repository for one, layers in self._layers if digest in layers)
        return tuple(one for one in found if one != self.destination.repository)

    def has_size(self, size: int) -> bool:
        """Whether a layer of exactly so many bytes is anywhere."""
        return size in self._sizes

    @cached_property
    def _sizes(self) -> frozenset[int]:
        return frozenset(size for _, layers in self._layers for size in layers.values())

    @cached_property
    def _layers(self) -> tuple[tuple[Reference, dict[Digest, int]], ...]:
        asked = tuple(dict.fromkeys([self.destination, *self.candidates]))
        if self.destination.transport != "docker":
            return ()
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="sisters") as pool:
            found = list(pool.map(_layers, asked))
        return tuple(zip(asked, found, strict=True))


def among(images: Iterable[Reference], destination: Reference) -> Sisters:
    """The images that lie in the destination's registry, as sisters."""
    here = ("docker", destination.registry)
    found = dict.fromkeys(one for one in images if (one.transport, one.registry) == here)
    return Sisters(destination, tuple(found) if destination.transport == "docker" else ())


def catalog_sisters(catalog: Catalog, target: Target, destination: Reference, settings: Settings) -> Sisters:
    """Where the images lie, by the catalog, that have one of the target's models on the same base and platform."""
    return among(_catalog_images(catalog, target, destination, settings), destination)


def hash_promising(
    image: Image, known: dict[str, Digest], sisters: Sisters, memo: LayerMemo, progress: Progress
) -> None:
    """Computes the digest of layers that may be there already, so that they need not be sent to learn it.

    Only layers whose size a sister has: a wrong guess costs reading the file twice. Adds to `known` and the memo.
    """
    for layer in image.layers:
        blob = layer.blob
        if not isinstance(blob, TarLayer) or blob.key in known or not sisters.has_size(blob.size):
            continue
        with progress.bar(f"hash {blob.title}", blob.size) as bar:
            digest = pour(blob, lambda _: None, bar.advance)
        known[blob.key] = digest
        memo.remember(blob.key, digest)


def _catalog_images(
    catalog: Catalog, target: Target, destination: Reference, settings: Settings
) -> Iterator[Reference]:
    if destination.transport != "docker":
        return
    wanted = {key for key, _ in target.models}
    beside = f"{destination.registry}/{destination.repository.rpartition('/')[0]}".rstrip("/")
    for row in build_keys(catalog):
        other = find_target(catalog, row.key, base=target.base_key, platform=target.platform)
        if wanted.isdisjoint(key for key, _ in other.models):
            continue
        for registry in dict.fromkeys([beside, settings.registry or catalog.publish.repository or beside]):
            text = default_destination(catalog, other, registry=registry, tag=settings.tag)
            yield parse_reference(text)


def _layers(reference: Reference) -> dict[Digest, int]:
    """The layers of an image, of every platform, with their sizes; none when it cannot be read."""
    try:
        source = open_source(reference)
        return {layer.digest: layer.size for layer in _layers_of(source, reference.wanted)}
    except DuopackError:
        return {}


def _layers_of(source: Source, wanted: str) -> Iterator[Descriptor]:
    descriptor, data = source.manifest(wanted)
    document = parse_document(data, descriptor.media_type, where=wanted)
    if isinstance(document, Manifest):
        yield from document.layers
        return
    for one in _images(document):
        found, inner = source.manifest(str(one.digest))
        # An index in an index is not followed: nothing here writes such.
        inside = parse_document(inner, found.media_type, where=str(one.digest))
        yield from inside.layers if isinstance(inside, Manifest) else ()


def _images(index: Index) -> tuple[Descriptor, ...]:
    return index.manifests[:_MAX_PLATFORMS]
