"""Images beside a destination, in the same registry, whose layers can be mounted instead of sent.

What a registry says of a layer proves nothing about its content: it only tells which layers are worth looking for.
A layer is taken from a sister by the digest that this project has computed from its own files, now or earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pipeline.catalog.schema import Catalog
from pipeline.catalog.target import Target, build_keys, default_destination, find_target
from pipeline.errors import DuopackError
from pipeline.oci.digest import Digest
from pipeline.oci.documents import Index, Manifest, parse_document
from pipeline.oci.model import Descriptor, Source
from pipeline.oci.places import open_source
from pipeline.oci.reference import Reference, parse_reference
from pipeline.settings import Settings

_MAX_PLATFORMS = 8


@dataclass(frozen=True)
class Sisters:
    """The layers of images in one registry: which repositories name a digest, and the sizes that there are."""

    holders: Mapping[Digest, tuple[str, ...]] = field(default_factory=dict)
    sizes: frozenset[int] = frozenset()


def find_sisters(candidates: Iterable[Reference], destination: Reference) -> Sisters:
    """Reads the manifests of the candidates that lie in the destination's registry; one that is not there is passed.

    The destination's own layers count for the sizes: they may be there already.
    """
    if destination.transport != "docker":
        return Sisters()
    found: dict[Digest, list[str]] = {}
    sizes: set[int] = set()
    for candidate in dict.fromkeys([destination, *candidates]):
        if (candidate.transport, candidate.registry) != ("docker", destination.registry):
            continue
        for layer in _layers(candidate):
            sizes.add(layer.size)
            if candidate.repository != destination.repository:
                found.setdefault(layer.digest, []).append(candidate.repository)
    return Sisters(
        {digest: tuple(dict.fromkeys(repositories)) for digest, repositories in found.items()},
        frozenset(sizes),
    )


def catalog_images(
    catalog: Catalog, target: Target, destination: Reference, settings: Settings
) -> tuple[Reference, ...]:
    """Where the images lie, by the catalog, that have one of the target's models on the same base and platform."""
    if destination.transport != "docker":
        return ()
    wanted = {key for key, _ in target.models}
    namespace = destination.repository.rpartition("/")[0]
    beside = f"{destination.registry}/{namespace}".rstrip("/")
    names: list[Reference] = []
    for row in build_keys(catalog):
        other = find_target(catalog, row.key, base=target.base_key, platform=target.platform)
        if wanted.isdisjoint(key for key, _ in other.models):
            continue
        for registry in dict.fromkeys([beside, settings.registry or beside]):
            text = default_destination(catalog, other, registry=registry, tag=settings.tag)
            names.append(parse_reference(text))
    return tuple(dict.fromkeys(names))


def _layers(reference: Reference) -> tuple[Descriptor, ...]:
    """The layers of an image, of every platform; none when it cannot be read."""
    try:
        source = open_source(reference)
        return _layers_of(source, reference.wanted)
    except DuopackError:
        return ()


def _layers_of(source: Source, wanted: str) -> tuple[Descriptor, ...]:
    descriptor, data = source.manifest(wanted)
    document = parse_document(data, descriptor.media_type, where=wanted)
    if isinstance(document, Manifest):
        return document.layers
    return tuple(layer for one in _images(document) for layer in _layers_of(source, str(one.digest)))


def _images(index: Index) -> tuple[Descriptor, ...]:
    return tuple(one for one in index.manifests if "manifest.v" in one.media_type)[:_MAX_PLATFORMS]
