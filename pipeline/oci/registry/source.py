"""Reading from a registry repository: manifests, blobs, tags. Nothing is believed before it is hashed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

from pipeline.errors import DuopackError, quoted
from pipeline.oci.digest import Digest
from pipeline.oci.model import (
    DOCKER_LIST,
    DOCKER_MANIFEST,
    MAX_MANIFEST,
    OCI_INDEX,
    OCI_MANIFEST,
    Blob,
    Descriptor,
)
from pipeline.oci.registry.client import Client, resolved_address
from pipeline.oci.registry.failures import RegistryError

_TYPES = (OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST)
_MAX_TAGS = 20_000
_MAX_PAGES = 200
_PIECE = 1 << 20
_MAX_SKIPPED = 64 << 20
"""Bytes that are read in vain when a registry or a cache in between knows no ranges."""


class RegistrySource:
    """A repository as a place to read from."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def manifest(self, reference: str) -> tuple[Descriptor, bytes]:
        """The manifest or index under a tag or digest, checked against every digest known for it."""
        return read_manifest(self._client, reference)

    def blob(self, descriptor: Descriptor) -> Blob:
        """A blob, not asked for yet."""
        return RegistryBlob(descriptor.media_type, descriptor.size, descriptor.digest, self._client)

    def tags(self) -> tuple[str, ...]:
        """The repository's tags, in the registry's order."""
        client, found = self._client, list[str]()
        url = client.url("tags/list?n=1000")
        for _ in range(_MAX_PAGES):
            answer = client.ask(
                "GET", url, f"listing the tags of {client.repository}", expect=(200,), limit=MAX_MANIFEST
            )
            page = _tags_of(answer.body, client.registry)
            found += page
            following = re.match(r'\s*<([^>]+)>\s*;\s*rel="?next"?', answer.header("Link"))
            if not following or not page or len(found) > _MAX_TAGS:
                break
            target = resolved_address(url, following[1])
            if target is None or target.netloc != urlsplit(url).netloc or urlunsplit(target) == url:
                break
            url = urlunsplit(target)
        return tuple(dict.fromkeys(found[:_MAX_TAGS]))

    def close(self) -> None:
        self._client.close()


def read_manifest(client: Client, reference: str) -> tuple[Descriptor, bytes]:
    """Gets a manifest by tag or digest; raises RegistryError when it is absent, too large, or not itself."""
    name = f"{client.repository}{'@' if ':' in reference else ':'}{reference}"
    answer = client.ask(
        "GET",
        client.url(f"manifests/{reference}"),
        f"reading {name}",
        expect=(200,),
        headers={"Accept": ", ".join(_TYPES)},
        limit=MAX_MANIFEST + 1,
    )

    def wrong(what: str) -> RegistryError:
        return RegistryError(
            what, where=f"{client.registry}/{name}", mend="do not use this image; ask who runs the registry"
        )

    if len(answer.body) > MAX_MANIFEST:
        raise wrong("its manifest is larger than 4 MiB")
    digest = Digest.of(answer.body)
    claims = {
        claim for claim in (reference, answer.header("Docker-Content-Digest")) if claim.startswith("sha256:")
    }
    if claims - {digest}:
        raise wrong(
            f"the manifest that came is {digest}, not {quoted(', '.join(sorted(claims - {digest})), 90)}"
        )
    stated = answer.header("Content-Type").partition(";")[0].strip().lower()
    media_type = _media_type(answer.body) or stated
    if media_type not in _TYPES:
        raise wrong(
            f"its manifest is of a type that duopack cannot use: '{quoted(media_type or 'none', 80)}'"
        )
    # Two readings of one document are an old attack: the header and the body have to agree.
    if stated in _TYPES and stated != media_type:
        raise wrong(f"its manifest calls itself {media_type}, and the registry calls it {stated}")
    return Descriptor(media_type, digest, len(answer.body)), answer.body


@dataclass(frozen=True)
class RegistryBlob:
    """A blob in a registry. Read from its start it is checked against its digest at the end.

    Read from a later offset only the length can be checked: the reader who has hashed what came before
    checks the whole.
    """

    media_type: str
    size: int
    digest: Digest
    _client: Client = field(repr=False, compare=False)

    def read(self, offset: int = 0) -> Iterator[bytes | memoryview]:
        """The bytes from `offset`; a cut connection is taken up again where it broke.

        Raises RegistryError when they cannot be had, and DuopackError when they are not what the digest says.
        """
        hashing = hashlib.sha256()
        position, failures = offset, 0
        while position < self.size:
            try:
                # A piece that goes beyond the promised size is not handed on.
                for piece in self._pieces(position):
                    position += len(piece)
                    failures = 0
                    if position > self.size:
                        break
                    if offset == 0:
                        hashing.update(piece)
                    yield piece
            except RegistryError as error:
                failures += 1
                if not error.transient or failures >= self._client.patience.attempts:
                    raise
                self._client.patience.wait(failures, error)
        if position > self.size or (offset == 0 and hashing.hexdigest() != self.digest.hex):
            raise DuopackError(
                "the bytes that came are not those of this digest",
                where=f"{self._client.registry}/{self._client.repository}@{self.digest}",
                mend="look for a faulty proxy or disk at the registry; nothing of it was used",
            )

    def read_range(self, offset: int, size: int) -> bytes:
        """A part, unchecked. Raises RegistryError when it cannot be had, or the blob has another size there."""
        return self._client.patience.run(lambda: self._part(offset, size)) if size else b""

    def _part(self, offset: int, size: int) -> bytes:
        client, doing = self._client, f"reading a part of the blob {self.digest} of {self._client.repository}"
        ranged = {"Range": f"bytes={offset}-{offset + size - 1}"}
        opened = client.open(client.url(f"blobs/{self.digest}"), doing, expect=(200, 206), headers=ranged)
        with opened:
            begins = opened.header("Content-Range").partition("/")[0] == f"bytes {offset}-{offset + size - 1}"
            total = opened.header("Content-Range").rpartition("/")[2]
            if opened.status == 206 and (not begins or total not in {str(self.size), "*"}):
                raise RegistryError(
                    f"it has another blob than the manifest says: {quoted(opened.header('Content-Range'), 80)}",
                    where=f"{client.registry}/{client.repository}@{self.digest}",
                    mend="push the image again; ask who runs the registry",
                )
            skip = offset if opened.status == 200 else 0
            if skip + size > _MAX_SKIPPED:
                raise RegistryError(
                    "it does not send parts of blobs",
                    where=client.registry,
                    mend="read the whole image: --deep",
                )
            body = opened.read(skip + size).body[skip:]
        if len(body) < size:
            raise RegistryError(
                f"the blob {self.digest} ended early", where=client.registry, mend="try again", transient=True
            )
        return body

    def _pieces(self, start: int) -> Iterator[bytes]:
        client, wanted = self._client, self.size - start
        doing = f"reading the blob {self.digest} of {client.repository}"
        ranged = {"Range": f"bytes={start}-"} if start else {}
        opened = client.open(client.url(f"blobs/{self.digest}"), doing, expect=(200, 206), headers=ranged)
        with opened:
            skip = start if opened.status == 200 else 0
            if opened.status == 206 and not opened.header("Content-Range").startswith(f"bytes {start}-"):
                raise RegistryError(
                    "it sent another part of a blob than was asked for",
                    where=client.registry,
                    mend="look at proxies in between",
                )
            came = 0
            for piece in opened.pieces(skip + wanted, _PIECE):
                came += len(piece)
                if fresh := piece[max(0, len(piece) - (came - skip)) :] if came > skip else b"":
                    yield fresh
        if came < skip + wanted:
            raise RegistryError(
                f"the blob {self.digest} ended early", where=client.registry, mend="try again", transient=True
            )


def _media_type(body: bytes) -> str:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    found = value.get("mediaType") if isinstance(value, dict) else ""
    return found if isinstance(found, str) else ""


def _tags_of(body: bytes, registry: str) -> list[str]:
    try:
        tags = json.loads(body)["tags"] or []
        return [tag for tag in tags if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", tag)]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RegistryError(
            "its list of tags is not readable", where=registry, mend="look for a proxy in between"
        ) from None
