"""A finished image copied, byte for byte, to where people pull it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pipeline.catalog.target import Target
from pipeline.errors import DuopackError, UsageError, quoted
from pipeline.oci.digest import Digest
from pipeline.oci.documents import config_platform, parse_object, resolve, same_platform
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
    """What the image of a key must be, since its name and tag will say so. `base` is None when they do not."""

    target: Target
    base: Digest | None


def publish(
    source: Reference,
    destination: Reference,
    settings: Settings,
    progress: Progress,
    expected: Expected | None = None,
) -> Published:
    """Copies an image; within one registry its layers are mounted, not moved.

    Raises UsageError when source and destination are one place, DuopackError when the image is not what is
    expected of it or the copy fails.
    """
    if replace(source, digest=None) == replace(destination, digest=None):
        raise UsageError(
            "source and destination are the same", where=str(destination), mend="name another one with --to"
        )
    images = open_source(source)
    # By digest from here on: a tag that moves meanwhile changes nothing.
    found = resolve(images, source.wanted, expected.target.platform if expected else None)
    if expected:
        _require(expected, _config(images, found.manifest.config), str(source))
    sink = open_sink(destination, mount_from=mountable(source, destination), journal=settings.upload_journal)
    sending = Sending(progress, sink)
    descriptor = copy_image(
        images, found.descriptor.digest, None, sink, parallel=settings.parallel, on_layer=sending
    )
    return Published(str(source), str(destination), descriptor.digest, sending.layers, sending.bytes)


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
    if expected.base:
        wanted["org.opencontainers.image.base.digest"] = expected.base
    for name, value in wanted.items():
        if labels.get(name) != value:
            raise DuopackError(
                f"the image's label {name} is '{quoted(str(labels.get(name)))}', "
                f"but '{target.key}' is to be published with '{value}'",
                where=where,
                mend=_REBUILD,
            )
