"""A finished image copied, byte for byte, to where people pull it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.catalog.target import Target
from pipeline.errors import DuopackError, UsageError, quoted
from pipeline.oci.digest import Digest
from pipeline.oci.documents import (
    Index,
    config_platform,
    parse_document,
    parse_object,
    resolve,
    same_platform,
)
from pipeline.oci.index import open_family
from pipeline.oci.model import MAX_CONFIG, Source
from pipeline.oci.places import open_sink, open_source
from pipeline.oci.reference import Reference, parse_reference
from pipeline.oci.transfer import copy_image
from pipeline.reports.progress import Progress
from pipeline.settings import Settings
from pipeline.stages.base import mountable
from pipeline.stages.launch import LABEL
from pipeline.stages.sending import Sending

_REBUILD = "build it again with the same options, then publish it"


@dataclass(frozen=True)
class Published:
    """An image at its destination; `sent` counts the bytes that moved."""

    source: str
    destination: str
    digest: str
    layers_sent: int
    sent: int


@dataclass(frozen=True)
class Expected:
    """What the image of a key must be, since its name and tag will say so.

    `bases` has the base's digest for each platform; it is None when the name does not tell the base.
    """

    target: Target
    bases: Mapping[str, Digest] | None

    def on(self, platform: str) -> Expected:
        """The same for another platform. Raises DuopackError for one that is neither the target's nor its base's."""
        known = [one for one in self.target.base.platforms if same_platform(one, platform)]
        if not known:
            raise DuopackError(
                f"there is an image for {quoted(platform, 60)}, which the base '{self.target.base_key}' does not have",
                where=self.target.key,
                mend=_REBUILD,
            )
        return replace(self, target=replace(self.target, platform=known[0]))


def publish(
    source: Reference,
    destination: Reference,
    settings: Settings,
    progress: Progress,
    expected: Expected | None = None,
    *,
    whole: bool = False,
) -> Published:
    """Copies an image; within one registry its layers are mounted, not moved.

    Of several platforms the image of the target's, or with `whole` all of them and their index. Raises UsageError
    when source and destination are one place, DuopackError when the image is not what is expected of it or the
    copy fails.
    """
    if replace(source, digest=None) == replace(destination, digest=None):
        raise UsageError(
            "source and destination are the same", where=str(destination), mend="name another one with --to"
        )
    images = open_source(source)
    # By digest from here on: a tag that moves meanwhile changes nothing.
    top, data = images.manifest(source.wanted)
    index = parse_document(data, top.media_type, where=str(source))
    if whole and isinstance(index, Index) and len(index.manifests) > 1:
        return _publish_all(images, index, data, source, destination, settings, progress, expected)
    found = resolve(images, str(top.digest), expected.target.platform if expected else None)
    if expected:
        _require(expected, _config(images, found.manifest.config), str(source))
    sink = open_sink(destination, mount_from=mountable(source, destination), journal=settings.upload_journal)
    sending = Sending(progress, sink)
    descriptor = copy_image(
        images, found.descriptor.digest, None, sink, parallel=settings.parallel, on_layer=sending
    )
    return Published(str(source), str(destination), descriptor.digest, sending.layers, sending.bytes)


def _publish_all(
    images: Source,
    index: Index,
    data: bytes,
    source: Reference,
    destination: Reference,
    settings: Settings,
    progress: Progress,
    expected: Expected | None,
) -> Published:
    """The image of each platform, all looked at before the first moves, then the index as it is."""
    members = [(one, resolve(images, str(one.digest), None)) for one in index.manifests]
    for one, found in members:
        if expected:
            own = expected.on(one.platform or "")
            _require(own, _config(images, found.manifest.config), f"{source}@{one.digest}")
    family = open_family(
        destination, mount_from=mountable(source, destination), journal=settings.upload_journal
    )
    layers = sent = 0
    try:
        for one, _ in members:
            sink = family.member(one.platform or "")
            sending = Sending(progress, sink)
            copy_image(images, str(one.digest), None, sink, parallel=settings.parallel, on_layer=sending)
            layers, sent = layers + sending.layers, sent + sending.bytes
        made = family.finish([one for one, _ in members], data)
    except BaseException:
        family.abort()
        raise
    digest = made.digest if made else members[0][0].digest
    return Published(str(source), str(destination), digest, layers, sent)


def under_registry(destination: Reference, registry: str) -> Reference:
    """The same image name and tag under another registry and namespace: where a candidate was put.

    Raises UsageError when the destination is not in a registry, or `registry` is malformed.
    """
    if destination.transport != "docker":
        raise UsageError(
            "only an image that goes to a registry has a namesake in another one",
            where="--from-registry",
            mend="set DUOPACK_REGISTRY to where it shall be published, or give --to docker://…",
        )
    name = destination.repository.rpartition("/")[2]
    return parse_reference(
        f"docker://{registry.removeprefix('docker://').rstrip('/')}/{name}:{destination.tag}"
    )


def _config(images: Source, descriptor: Any) -> dict[str, Any]:
    data = b"".join(images.blob(descriptor).read())
    return parse_object(data, where="config", limit=MAX_CONFIG)


def _require(expected: Expected, config: dict[str, Any], where: str) -> None:
    """An image under a name that says something else is what this project exists to prevent."""
    target = expected.target
    platform = config_platform(config)
    if not same_platform(platform, target.platform):
        raise DuopackError(
            f"the image is for {quoted(platform)}, not for {target.platform}", where=where, mend=_REBUILD
        )
    labels = (config.get("config") or {}).get("Labels") or {}
    wanted = {
        f"{LABEL}models": ",".join(key for key, _ in target.models),
        f"{LABEL}default-profile": target.script,
    }
    if expected.bases is not None:
        wanted["org.opencontainers.image.base.digest"] = expected.bases.get(target.platform, "")
    for name, value in wanted.items():
        if labels.get(name) != value:
            raise DuopackError(
                f"the image's label {name} is '{quoted(str(labels.get(name)))}', "
                f"but '{target.key}' is to be published with '{value}'",
                where=where,
                mend=_REBUILD,
            )
