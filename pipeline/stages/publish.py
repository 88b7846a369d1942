"""A finished image copied, byte for byte, to where people pull it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.errors import UsageError
from pipeline.oci.places import open_sink, open_source
from pipeline.oci.reference import Reference, parse_reference
from pipeline.oci.transfer import copy_image
from pipeline.reports.progress import Progress
from pipeline.settings import Settings
from pipeline.stages.base import mountable
from pipeline.stages.sending import Sending


@dataclass(frozen=True)
class Published:
    """An image at its destination; `sent` counts the bytes that moved."""

    source: str
    destination: str
    digest: str
    layers_sent: int
    sent: int


def publish(source: Reference, destination: Reference, settings: Settings, progress: Progress) -> Published:
    """Copies an image; within one registry its layers are mounted, not moved.

    Raises UsageError when source and destination are one place, DuopackError when the copy fails.
    """
    if replace(source, digest=None) == replace(destination, digest=None):
        raise UsageError(
            "source and destination are the same", where=str(destination), mend="name another one with --to"
        )
    sending = Sending(progress)
    sink = open_sink(destination, mount_from=mountable(source, destination), journal=settings.upload_journal)
    descriptor = copy_image(
        open_source(source), source.wanted, None, sink, parallel=settings.parallel, on_layer=sending
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
    return parse_reference(f"docker://{registry.rstrip('/')}/{name}:{destination.tag}")
