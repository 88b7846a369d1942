"""Writing one image to a registry: blobs in any order, the manifest last, and read back."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.errors import DuopackError, UsageError
from pipeline.oci.digest import Digest
from pipeline.oci.model import (
    DOCKER_CONFIG,
    DOCKER_MANIFEST,
    OCI_CONFIG,
    OCI_MANIFEST,
    Blob,
    Descriptor,
    OnBytes,
)
from pipeline.oci.reference import Reference
from pipeline.oci.registry.client import Client
from pipeline.oci.registry.failures import RegistryError
from pipeline.oci.registry.habits import CHUNK, Habits
from pipeline.oci.registry.journal import Journal
from pipeline.oci.registry.source import read_manifest
from pipeline.oci.registry.upload import BlobUpload

# Long before any garbage collection (Harbor's spares blobs of the last two hours).
_SEEN_SECONDS = 600.0


class Holders(Protocol):
    """Who says which of a registry's repositories hold a blob."""

    @property
    def repositories(self) -> tuple[str, ...]:
        """All that `holding` may name: the right to read them is asked for."""
        ...

    def holding(self, digest: Digest) -> tuple[str, ...]: ...


class RegistrySink:
    """A `docker://` reference as a place to write to. Blobs may be put from several threads.

    `mount_from` are repositories of the same registry that may hold blobs already; `holders` knows which are
    said to hold one. `journal` is a directory in which uploads that a killed process left open are
    remembered. `chunk` is in bytes. With `by_digest` the manifest gets no tag: an index will name it.
    """

    parallel = 4

    def __init__(
        self,
        client: Client,
        reference: Reference,
        *,
        mount_from: tuple[str, ...] = (),
        holders: Holders | None = None,
        journal: Path | None = None,
        chunk: int = CHUNK,
        by_digest: bool = False,
    ) -> None:
        if not reference.tag and not reference.digest:
            raise UsageError("a destination in a registry needs a tag", where=str(reference))
        self._client = client
        self._by_digest = by_digest
        self._holders = holders
        self._reference = reference
        self._mount_from = tuple(other for other in mount_from if other != reference.repository)
        self._journal = Journal(journal, f"{reference.registry}/{reference.repository}")
        self._habits = Habits.of(reference.registry, chunk)
        self._seen: dict[Digest, float] = {}
        self._mutex = threading.Lock()
        self.spared_bytes = 0
        """What `on_bytes` was told of without its being sent: mounted, or there from an earlier run."""
        self.spared_blobs = 0
        """Blobs of which nothing was sent."""

    def has(self, digest: Digest, size: int) -> bool:
        """Asks the registry (HEAD); what a sister repository is said to hold is mounted.

        Raises RegistryError when it cannot be asked.
        """
        found = self._client.has_blob(digest, size) or self._adopt(digest, size)
        if found:
            self._seen[digest] = time.monotonic()
        return found

    def put_blob(self, blob: Blob, on_bytes: OnBytes) -> Digest:
        """Mounts the blob from a sister repository or sends it.

        `on_bytes` comes to `blob.size` in total, also for bytes that were mounted or sent by an earlier run.
        """
        self._require_open()
        digest, spared = self._take(blob, on_bytes)
        with self._mutex:
            self.spared_bytes += spared
            self.spared_blobs += spared == blob.size
        return digest

    def put_manifest(self, manifest: bytes, config: bytes, layers: tuple[Descriptor, ...]) -> Descriptor:
        """Sends the config and the manifest, after every layer is known to be there; reads it back by name.

        Raises RegistryError, also for a layer that the registry has lost meanwhile.
        """
        self._require_open()
        media_type = _media_type(manifest)
        wanted = Descriptor(media_type, Digest.of(manifest), len(manifest))
        if self._reference.digest not in {None, wanted.digest}:
            raise DuopackError(
                f"the image has the digest {wanted.digest}, not the one in its name",
                where=str(self._reference),
                mend="name the destination by tag",
            )
        config_type = DOCKER_CONFIG if media_type == DOCKER_MANIFEST else OCI_CONFIG
        blob = _Bytes(config_type, config)
        if not self.has(blob.digest, blob.size):
            self._take(blob, lambda _: None)
        self._require_layers(layers)
        tag = None if self._by_digest else self._reference.tag
        self._put_document(tag or str(wanted.digest), wanted, manifest)
        self.close()
        return wanted

    def put_index(self, index: bytes) -> Descriptor:
        """Gives an index the name; the registry refuses one whose manifests it does not have."""
        self._require_open()
        wanted = Descriptor(_media_type(index), Digest.of(index), len(index))
        self._put_document(self._reference.tag or str(wanted.digest), wanted, index)
        self.close()
        return wanted

    def abort(self) -> None:
        """Stops uploads that are running. No image was made; blobs that are complete are not sent again."""
        self._client.abort()
        self._journal.close()

    def close(self) -> None:
        """Lets go of connections and of the journal."""
        self._journal.close()
        self._client.close()

    def _put_document(self, name: str, wanted: Descriptor, document: bytes) -> None:
        self._client.ask(
            "PUT",
            self._client.url(f"manifests/{name}"),
            f"writing {self._client.repository}{'@' if ':' in name else ':'}{name}",
            expect=(200, 201, 202),
            headers={"Content-Type": wanted.media_type},
            body=document,
        )
        found, data = read_manifest(self._client, name)
        if data != document:
            raise RegistryError(
                f"the manifest read back is {found.digest}, not the {wanted.digest} that was written",
                where=str(self._reference),
                mend="somebody else may be writing to this tag: look at it, then run the same command again",
            )

    def _adopt(self, digest: Digest, size: int) -> bool:
        """Mounts a blob from a repository that is said to hold it; whether it is here now."""
        for other in self._holders.holding(digest) if self._holders else ():
            is_mounted, location = self._mount_one(digest, other)
            if location:
                self._client.cancel(location)
            if is_mounted and self._client.has_blob(digest, size):
                return True
        return False

    def _take(self, blob: Blob, on_bytes: OnBytes) -> tuple[Digest, int]:
        """The digest of what arrived, and how many of its bytes had not to be sent."""
        is_mounted, location = self._mount(blob.digest) if blob.digest else (False, None)
        if is_mounted and blob.digest:
            on_bytes(blob.size)
            return self._arrived(blob.digest), blob.size
        has_spare_core = (os.cpu_count() or 1) > self.parallel
        upload = BlobUpload(self._client, blob, on_bytes, self._habits, self._journal, beside=has_spare_core)
        return self._arrived(upload.run(location)), upload.taken_up

    def _mount(self, digest: Digest) -> tuple[bool, str | None]:
        """Whether a sister repository's blob is now ours too; if not, the upload session that it led to."""
        location = None
        for other in self._mount_from:
            if location:
                self._client.cancel(location)
            is_mounted, location = self._mount_one(digest, other)
            if is_mounted:
                return True, None
        return False, location

    def _mount_one(self, digest: Digest, other: str) -> tuple[bool, str | None]:
        """The same for one sister."""
        url = self._client.url(f"blobs/uploads/?mount={digest}&from={other}")
        try:
            answer = self._client.ask("POST", url, f"mounting a blob from {other}", expect=(201, 202))
        except RegistryError as error:
            if error.transient:
                raise
            return False, None  # not allowed to, or not known there: it will be sent
        return answer.status == 201, None if answer.status == 201 else self._client.locate(answer, url)

    def _arrived(self, digest: Digest) -> Digest:
        self._seen[digest] = time.monotonic()
        return digest

    def _require_layers(self, layers: tuple[Descriptor, ...]) -> None:
        """Looks again for layers that were not seen lately: a garbage collection may have run meanwhile."""
        oldest = time.monotonic() - _SEEN_SECONDS
        doubtful = {one.digest: one for one in layers if self._seen.get(one.digest, -_SEEN_SECONDS) < oldest}
        with ThreadPoolExecutor(self.parallel) as pool:
            present = list(pool.map(lambda one: self.has(one.digest, one.size), doubtful.values()))
        for layer, is_present in zip(doubtful.values(), present, strict=True):
            if not is_present:
                raise RegistryError(
                    f"the layer {layer.digest} is not in the registry, or no longer",
                    where=str(self._reference),
                    mend="run the same command again: it will be sent, and what is there will not",
                )

    def _require_open(self) -> None:
        if self._client.stop.is_set():
            raise DuopackError("the upload was stopped", where=str(self._reference))


@dataclass(frozen=True)
class _Bytes:
    """A blob in memory."""

    media_type: str
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def digest(self) -> Digest:
        return Digest.of(self.data)

    def read(self, offset: int = 0) -> Iterator[bytes | memoryview]:
        yield self.data[offset:]


def _media_type(manifest: bytes) -> str:
    with suppress(ValueError, RecursionError):
        value = json.loads(manifest)
        if isinstance(value, dict) and isinstance(value.get("mediaType"), str):
            return str(value["mediaType"])
    return OCI_MANIFEST
