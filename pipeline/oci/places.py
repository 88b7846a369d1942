"""From a reference to the place it names. Each kind of place is loaded only when it is used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.oci.model import Sink, Source
from pipeline.oci.reference import DEFAULT_TAG, Reference

if TYPE_CHECKING:
    from pipeline.oci.registry.client import Client
    from pipeline.oci.registry.sink import Holders


def open_source(ref: Reference, *, plain_http: bool = False, scratch: Path | None = None) -> Source:
    """A place to read from. An engine's image passes through a temporary file in `scratch`, as large as itself."""
    if ref.transport == "docker":
        from pipeline.oci.registry.source import RegistrySource

        return RegistrySource(_client(ref, plain_http=plain_http, push=False))
    if ref.transport == "oci":
        from pipeline.oci.layout import LayoutSource

        return LayoutSource(ref.path)
    if ref.transport == "docker-archive":
        from pipeline.oci.archive_source import ArchiveSource

        return ArchiveSource(ref.path, ref.name_tag)
    from pipeline.oci.daemon_source import DaemonSource

    return DaemonSource(ref.name_tag, scratch)


def open_sink(
    ref: Reference,
    *,
    plain_http: bool = False,
    mount_from: tuple[str, ...] = (),
    holders: Holders | None = None,
    journal: Path | None = None,
    by_digest: bool = False,
    name: str = "",
) -> Sink:
    """A place to write one image to.

    For a registry, `mount_from` are repositories of it that may hold blobs already, `holders` those that are said
    to hold a blob, and `journal` is a directory in which interrupted uploads are remembered. With `by_digest` a
    registry or a layout gives the image no tag. A layout keeps `name` as the image's whole name.
    """
    if ref.transport == "docker":
        from pipeline.oci.registry.sink import RegistrySink

        sisters = tuple(dict.fromkeys([*mount_from, *(holders.repositories if holders else ())]))
        client = _client(ref, plain_http=plain_http, push=True, mount_from=sisters)
        return RegistrySink(
            client, ref, mount_from=mount_from, holders=holders, journal=journal, by_digest=by_digest
        )
    if ref.transport == "oci":
        from pipeline.oci.layout import LayoutSink

        return LayoutSink(ref.path, ref.tag or DEFAULT_TAG, name, listed=not by_digest)
    if ref.transport == "docker-archive":
        from pipeline.oci.archive import ArchiveSink

        return ArchiveSink(ref.path, ref.name_tag)
    from pipeline.oci.daemon import DaemonSink

    return DaemonSink(ref.name_tag)


def _client(ref: Reference, *, plain_http: bool, push: bool, mount_from: tuple[str, ...] = ()) -> Client:
    from pipeline.oci.registry.client import Client
    from pipeline.oci.registry.settings import Settings

    settings = Settings.from_environment()
    if plain_http:
        settings = settings.with_plain(ref.registry)
    return Client(ref.registry, ref.repository, settings, push=push, mount_from=mount_from)
