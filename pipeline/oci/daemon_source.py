"""Images read from a Docker engine.

The engine's API gives an image's files only as `docker save` does, all of them: they pass through a temporary file
without a name, which the system removes when this process ends, however it ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import DuopackError, quoted
from pipeline.files import disk_errors, human_size, require_space
from pipeline.oci.archive_source import ArchiveSource
from pipeline.oci.digest import Digest
from pipeline.oci.documents import Manifest, parse_document
from pipeline.oci.model import Blob, Descriptor, OnBytes
from pipeline.oci.partial import make_directory

if TYPE_CHECKING:
    from docker import APIClient

_ENGINE_SECONDS = 3600
_PIECE = 2 << 20
_SLACK = 64 << 20
"""Bytes of headers and small files that an archive may have beyond its layers, plus an eighth of them."""


class DaemonSource:
    """The image `name_tag` of the engine of DOCKER_HOST.

    `scratch` is a directory for the temporary file, which needs as much space as the image (default: the system's).
    `on_bytes` is told what comes from the engine.
    """

    def __init__(
        self, name_tag: str, scratch: Path | None = None, on_bytes: OnBytes = lambda _: None
    ) -> None:
        self._name_tag = name_tag
        self._scratch = scratch or Path(tempfile.gettempdir())
        self._on_bytes = on_bytes
        self._archive: ArchiveSource | None = None
        self._handle = -1

    def manifest(self, reference: str = "") -> tuple[Descriptor, bytes]:
        """The image's manifest: the first call fetches the image. Raises DuopackError when the engine has none."""
        return self._open().manifest(reference if reference.startswith("sha256:") else "")

    def blob(self, descriptor: Descriptor) -> Blob:
        return self._open().blob(descriptor)

    def close(self) -> None:
        """Lets go of the temporary file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle, self._archive = -1, None

    def _open(self) -> ArchiveSource:
        if self._archive is None:
            engine = self._connect()
            found = self._inspect(engine)
            bound = self._bound(found)
            make_directory(self._scratch)
            require_space(self._scratch, bound - _SLACK, purpose="the engine's copy of the image")
            with (
                disk_errors(self._scratch),
                tempfile.TemporaryFile(prefix="duopack-", dir=self._scratch) as file,
            ):
                self._handle = os.dup(file.fileno())
                self._fetch(engine, file.write, bound)
            # The file has no name: it is reached through the handle that is kept open.
            archive = ArchiveSource(Path(f"/proc/self/fd/{self._handle}"))
            self._check(archive, found)
            self._archive = archive
        return self._archive

    def _fetch(self, engine: APIClient, write: Any, bound: int) -> None:
        came = 0
        for piece in self._pieces(engine):
            came += len(piece)
            if came > bound:
                raise self._error(
                    f"the engine sends more than the {human_size(bound)} that the image should have"
                )
            write(piece)
            self._on_bytes(len(piece))

    def _pieces(self, engine: APIClient) -> Iterator[bytes]:
        try:
            yield from engine.get_image(self._name_tag, _PIECE)
        except DuopackError:
            raise
        except Exception as error:
            raise self._error(f"the engine did not give the image: {_reason(error)}") from error

    def _bound(self, found: dict[str, Any]) -> int:
        size = found.get("Size")
        return (size + size // 8 if isinstance(size, int) else 0) + _SLACK

    def _inspect(self, engine: APIClient) -> dict[str, Any]:
        try:
            found: dict[str, Any] = engine.inspect_image(self._name_tag)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise self._error(
                f"the engine has no such image: {_reason(error)}", "`docker images` shows those it has"
            ) from error
        return found

    def _check(self, archive: ArchiveSource, found: dict[str, Any]) -> None:
        """The classic store names an image by its config, containerd's by its manifest."""
        descriptor, data = archive.manifest()
        document = parse_document(data, descriptor.media_type, where=str(self))
        digests: set[Digest] = {descriptor.digest}
        if isinstance(document, Manifest):
            digests.add(document.config.digest)
        if found.get("Id") not in digests:
            raise self._error("the engine sent another image than it named before")

    def _connect(self) -> APIClient:
        import docker

        try:
            engine = docker.from_env(timeout=_ENGINE_SECONDS).api
            engine.ping()
        except Exception as error:
            raise self._error(
                f"the engine does not answer: {_reason(error)}",
                "start it, check DOCKER_HOST and your permission to use it, or name the image in a registry",
            ) from error
        return engine

    def __str__(self) -> str:
        return f"docker-daemon:{self._name_tag}"

    def _error(self, what: str, mend: str = "look at the engine's log, then try again") -> DuopackError:
        return DuopackError(what, where=str(self), mend=mend)


def _reason(error: Exception) -> str:
    return quoted(str(getattr(error, "explanation", None) or error), 300)
