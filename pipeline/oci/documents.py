"""The JSON documents of an image, read with distrust: manifests, indexes, configs; and written in one form.

Facts: OCI image-spec 1.1 (manifest.md, image-index.md, descriptor.md), Docker manifest v2 schema 2.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pipeline.errors import DuopackError, quoted
from pipeline.oci.digest import Digest
from pipeline.oci.model import (
    DOCKER_CONFIG,
    DOCKER_LIST,
    DOCKER_MANIFEST,
    MAX_CONFIG,
    MAX_MANIFEST,
    OCI_CONFIG,
    OCI_INDEX,
    OCI_MANIFEST,
    Descriptor,
    Source,
)

# Far above any layer of weights; below it sums cannot overflow anywhere downstream.
_MAX_BLOB = 4 << 40
_MAX_NESTED_INDEXES = 3
_DEFAULT_VARIANTS = {"arm64": "v8", "arm": "v7", "amd64": "v1"}
_ARCHITECTURES = {"aarch64": "arm64", "x86_64": "amd64", "x86-64": "amd64"}


@dataclass(frozen=True)
class Manifest:
    """An image manifest of either family."""

    media_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]


@dataclass(frozen=True)
class Index:
    """An image index or manifest list, without the entries that are no images (attestations)."""

    media_type: str
    manifests: tuple[Descriptor, ...]


@dataclass(frozen=True)
class Resolved:
    """An image manifest as it was found: its descriptor, its exact bytes, what they say."""

    descriptor: Descriptor
    data: bytes
    manifest: Manifest


def canonical(value: Any) -> bytes:
    """JSON in the one form that this project writes: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parse_object(data: bytes, *, where: str, limit: int = MAX_MANIFEST) -> dict[str, Any]:
    """A JSON object from bytes of unknown origin, at most `limit` of them; else DuopackError."""
    if len(data) > limit:
        raise _bad(where, f"the document has {len(data)} bytes, more than the {limit} that are accepted")
    try:
        value = json.loads(data.decode())
        # What cannot be written again (NaN, infinity) is refused here and not at the end of a build.
        canonical(value)
    except (ValueError, RecursionError) as error:
        raise _bad(where, f"this is not valid JSON: {quoted(str(error))}") from error
    if not isinstance(value, dict):
        raise _bad(where, "this is not a JSON object")
    return value


def parse_descriptor(value: Any, *, where: str) -> Descriptor:
    """A descriptor with a checked digest, a size in a sane range and plain text annotations."""
    if not isinstance(value, dict):
        raise _bad(where, "a descriptor is not a JSON object")
    media_type, digest, size = value.get("mediaType"), value.get("digest"), value.get("size")
    if not isinstance(media_type, str) or not isinstance(digest, str):
        raise _bad(where, "a descriptor has no media type or no digest")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _MAX_BLOB:
        raise _bad(where, f"a descriptor has the size {quoted(repr(size))}")
    annotations = value.get("annotations") or {}
    if not isinstance(annotations, dict) or not all(isinstance(text, str) for text in annotations.values()):
        raise _bad(where, "a descriptor's annotations are not text")
    return Descriptor(
        media_type, Digest(digest), size, annotations, _platform_text(value.get("platform"), where)
    )


def parse_document(data: bytes, declared_type: str, *, where: str) -> Manifest | Index:
    """A manifest or an index. `declared_type` is the media type under which the bytes were given.

    Raises DuopackError for schema 1, for artifacts that are no images, for a document that could be taken
    for both, and for layers that are to be fetched from elsewhere.
    """
    value = parse_object(data, where=where)
    if value.get("schemaVersion") != 2:
        raise _bad(
            where,
            f"schemaVersion is {quoted(repr(value.get('schemaVersion')))}; only 2 is supported",
            mend="Docker schema 1 images are obsolete: push the image again with a current tool",
        )
    if "manifests" in value and ("layers" in value or "config" in value):
        raise _bad(where, "the document is both an index and a manifest, which the OCI specification forbids")
    kind = value.get("mediaType", declared_type)
    families = (OCI_INDEX, DOCKER_LIST) if "manifests" in value else (OCI_MANIFEST, DOCKER_MANIFEST)
    if kind not in families:
        raise _bad(where, f"the media type '{quoted(str(kind))}' is not that of an image")
    if "manifests" in value:
        entries = _list(value["manifests"], where)
        found = [parse_descriptor(entry, where=where) for entry in entries]
        return Index(kind, tuple(one for one in found if not _is_attestation(one)))
    config = parse_descriptor(value.get("config"), where=where)
    if config.media_type not in {OCI_CONFIG, DOCKER_CONFIG}:
        raise _bad(
            where,
            f"the config has the media type '{quoted(config.media_type)}'",
            mend="this is an artifact and not a container image: name an image",
        )
    if config.size > MAX_CONFIG:
        raise _bad(
            where, f"the config is said to have {config.size} bytes, more than the {MAX_CONFIG} accepted"
        )
    return Manifest(kind, config, tuple(_layer(entry, where) for entry in _list(value.get("layers"), where)))


def resolve(source: Source, reference: str, platform: str | None) -> Resolved:
    """The image manifest under a reference; an index is followed to the one for `platform`.

    Raises DuopackError when there is none, or more than one and no platform was asked for.
    """
    descriptor, data = source.manifest(reference)
    for _ in range(_MAX_NESTED_INDEXES):
        document = parse_document(data, descriptor.media_type, where=reference)
        if isinstance(document, Manifest):
            return Resolved(descriptor, data, document)
        chosen = choose(document, platform, where=reference)
        found, data = source.manifest(str(chosen.digest))
        descriptor = Descriptor(chosen.media_type, found.digest, found.size, platform=chosen.platform)
    raise _bad(reference, "indexes are nested too deeply")


def choose(index: Index, platform: str | None, *, where: str) -> Descriptor:
    """The entry of an index for a platform: `linux/arm64` matches variant v8 and none, as in containerd."""
    if platform is None:
        matching = index.manifests
    else:
        matching = tuple(
            one for one in index.manifests if one.platform and same_platform(one.platform, platform)
        )
        # An index made without platforms still serves when it holds one image; its config is checked later.
        if not matching and len(index.manifests) == 1 and index.manifests[0].platform is None:
            matching = index.manifests
    if len(matching) == 1 or (matching and platform is not None):
        return matching[0]
    have = (
        ", ".join(sorted({quoted(one.platform or "unknown", 60) for one in index.manifests})[:20]) or "none"
    )
    if platform is None and matching:
        raise _bad(
            where, f"the image is there for several platforms: {have}", mend="say which with --platform"
        )
    raise _bad(
        where,
        f"there is no image for {platform or 'any platform'}; there is: {have}",
        mend="use another base or --platform",
    )


def same_platform(one: str, other: str) -> bool:
    """Whether two platforms `os/arch[/variant]` mean the same, default variants filled in."""
    return normal_platform(one) == normal_platform(other)


def normal_platform(platform: str) -> str:
    """`os/arch/variant` with the common aliases and the default variant: linux/aarch64 is linux/arm64/v8."""
    os_name, _, rest = platform.lower().partition("/")
    arch, _, variant = rest.partition("/")
    arch = _ARCHITECTURES.get(arch, arch)
    variant = variant or _DEFAULT_VARIANTS.get(arch, "")
    return f"{os_name}/{arch}/{variant}" if variant else f"{os_name}/{arch}"


def config_platform(config: dict[str, Any]) -> str:
    """`os/arch[/variant]` as an image's config says it."""
    parts = [config.get("os"), config.get("architecture"), config.get("variant") or None]
    return "/".join(str(part) for part in parts if part is not None)


def _layer(value: Any, where: str) -> Descriptor:
    descriptor = parse_descriptor(value, where=where)
    if value.get("urls") or "foreign" in descriptor.media_type or "nondistributable" in descriptor.media_type:
        raise _bad(
            where,
            f"the layer {descriptor.digest} is foreign: its bytes are not in the registry",
            mend="use an image without non-distributable layers",
        )
    return descriptor


def _is_attestation(descriptor: Descriptor) -> bool:
    return descriptor.platform == "unknown/unknown" or "vnd.docker.reference.type" in descriptor.annotations


def _platform_text(value: Any, where: str) -> str | None:
    if value is None:
        return None
    wanted = ("os", "architecture", "variant")
    parts = [value.get(key) or "" for key in wanted] if isinstance(value, dict) else [""]
    if not all(isinstance(part, str) for part in parts) or "" in parts[:2]:
        raise _bad(where, "a descriptor's platform is malformed")
    return "/".join(part for part in parts if part)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _bad(where, "a list of descriptors is missing")
    return value


def _bad(
    where: str, what: str, *, mend: str = "check the place that it comes from, or use another image"
) -> DuopackError:
    return DuopackError(what, where=quoted(where), mend=mend)
