"""The names of images: where one is read from or written to.

Transports are those people know from skopeo. The grammar of `host/repository:tag@digest` is the reference
grammar of the distribution project (domain, path components, tag, digest) with docker's familiar rules:
without a host it is docker.io, and there a single name lives in `library/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pipeline.errors import UsageError, quoted
from pipeline.oci.digest import Digest

Transport = Literal["docker", "oci", "docker-archive", "docker-daemon"]

DOCKER_HUB = "docker.io"
DEFAULT_TAG = "latest"

_FORMS = (
    "docker://host/repository:tag, oci:DIR[:tag], docker-archive:FILE[:name:tag] or docker-daemon:name:tag"
)
_FOREIGN = ("oci-archive", "dir", "containers-storage", "ostree", "sif", "tarball")
_MAX_TEXT = 4096
_MAX_REPOSITORY = 255

_LABEL = r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
_DOMAIN = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::[0-9]{{1,5}})?")
_COMPONENT = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_CREDENTIALS = re.compile(r"\A(?:[a-z]+://)?(?!(?:oci|docker-archive):)[^/]*@(?!(?i:sha|md5))")
_DIGEST_TAIL = re.compile(r"@(sha256:[0-9a-f]{64})\Z")


@dataclass(frozen=True)
class Reference:
    """One image by name. `str()` gives the canonical text, which parses to an equal value.

    `registry` and `repository` are set for `docker`, `docker-daemon` and a named `docker-archive`;
    `path` for `oci` and `docker-archive`. With a digest the tag is only a remark: the digest decides.
    """

    transport: Transport
    registry: str = ""
    repository: str = ""
    path: Path = Path()
    tag: str | None = None
    digest: Digest | None = None

    def __str__(self) -> str:
        if self.transport == "docker":
            return f"docker://{self.registry}/{self.repository}{self._suffix}"
        if self.transport == "docker-daemon":
            return f"docker-daemon:{self.name_tag}"
        if self.transport == "docker-archive" and self.repository:
            return f"docker-archive:{self.path}:{self.name_tag}"
        return f"{self.transport}:{self.path}{self._suffix}"

    @property
    def name_tag(self) -> str:
        """The name as docker shows it: `qwen:1`, `registry.example/qwen:1`; empty for a nameless archive."""
        if not self.repository:
            return ""
        name = self.repository if self.registry == DOCKER_HUB else f"{self.registry}/{self.repository}"
        return (name.removeprefix("library/") if self.registry == DOCKER_HUB else name) + self._suffix

    @property
    def wanted(self) -> str:
        """What to ask a source for: the digest when there is one, else the tag, else nothing ('')."""
        return self.digest or self.tag or ""

    def with_tag(self, tag: str) -> Reference:
        """The same place under another tag, without a digest. Raises UsageError for a malformed tag."""
        return replace(self, tag=_checked_tag(tag, tag), digest=None)

    def with_digest(self, digest: Digest) -> Reference:
        """The same place, pinned."""
        return replace(self, digest=digest)

    @property
    def _suffix(self) -> str:
        return (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")


def parse_typed(text: str) -> Reference:
    """As `parse_reference`, for what a person typed: a name with neither transport nor host is refused.

    docker would take it for one on Docker Hub, but `9b.tar` or a misspelt key is more likely to be meant for
    something else, and no weights shall go there by mistake.
    """
    reference = parse_reference(text)
    if reference.transport == "docker" and reference.registry == DOCKER_HUB and "://" not in text:
        head = text.partition("/")[0]
        if not head.endswith(DOCKER_HUB):
            raise UsageError(
                f"'{quoted(text)}' names no registry, and is no key of the catalog",
                mend=f"write {_FORMS}; for Docker Hub {reference}; 'duopack list' shows the keys",
            )
    return reference


def parse_reference(text: str) -> Reference:
    """Reads an image name of any transport; a bare name is docker's. Raises UsageError when malformed."""
    if not text or len(text) > _MAX_TEXT or not text.isprintable() or text != text.strip():
        raise _malformed(text, "it is empty, too long, or has spaces or control characters around or in it")
    if text.startswith(("http://", "https://")) and "@" not in text:
        raise UsageError(
            f"'{quoted(text)}' is a web address, not an image name",
            mend=f"write docker://{quoted(text.partition('://')[2])}",
        )
    if _CREDENTIALS.search(text):
        raise UsageError(
            "the image name has a user name or a password in it",
            mend="leave them out, and run `docker login HOST` once",
        )
    if text.startswith("docker://"):
        return _named(text.removeprefix("docker://"), text, "docker")
    scheme, colon, rest = text.partition(":")
    if scheme == "oci" and colon:
        return _layout(rest, text)
    if scheme == "docker-archive" and colon:
        return _archive(rest, text)
    if scheme == "docker-daemon" and colon:
        return _daemon(rest, text)
    if (scheme in _FOREIGN and colon) or "://" in text:
        raise _malformed(text, f"the transport '{quoted(scheme)}' is not one of duopack's")
    return _named(text, text, "docker")


def _layout(rest: str, text: str) -> Reference:
    rest, digest = _split_digest(rest, text)
    path, colon, tag = rest.partition(":")
    if "/" in tag:
        # No tag has a slash: the first colon belongs to a directory's name, and maybe the last one too.
        path, colon, tag = rest.rpartition(":")
    if "/" in tag:
        path, colon, tag = rest, "", ""
    if not path:
        raise _malformed(text, "the directory is missing")
    if colon:
        _checked_tag(tag, text)
    return Reference("oci", path=Path(path), tag=tag or None, digest=digest)


def _archive(rest: str, text: str) -> Reference:
    path, colon, name = rest.partition(":")
    if not path:
        raise _malformed(text, "the file is missing")
    if not colon:
        return Reference("docker-archive", path=Path(path))
    return replace(_unpinned(name, text, "docker-archive"), path=Path(path))


def _daemon(rest: str, text: str) -> Reference:
    return _unpinned(rest, text, "docker-daemon")


def _unpinned(name: str, text: str, transport: Transport) -> Reference:
    reference = _named(name, text, transport)
    if reference.digest:
        raise _malformed(
            text, "an engine and an archive know images by name and tag, not by a manifest's digest"
        )
    return reference


def _named(name: str, text: str, transport: Transport) -> Reference:
    name, digest = _split_digest(name, text)
    head, slash, tail = name.partition("/")
    has_host = bool(slash) and (any(c in head for c in ".:") or head == "localhost")
    registry, path = (head, tail) if has_host else (DOCKER_HUB, name)
    path, colon, tag = path.partition(":")
    if not _DOMAIN.fullmatch(registry) or not _port_fits(registry):
        raise _malformed(text, f"'{quoted(registry)}' is not a host")
    if not _REPOSITORY.fullmatch(path) or len(path) > _MAX_REPOSITORY:
        raise _malformed(text, _why_bad_repository(path))
    if colon:
        _checked_tag(tag, text)
    registry = registry.lower()
    if registry in {"index.docker.io", "registry-1.docker.io"}:
        registry = DOCKER_HUB
    if registry == DOCKER_HUB and "/" not in path:
        path = f"library/{path}"
    return Reference(
        transport,
        registry=registry,
        repository=path,
        tag=tag or (None if digest else DEFAULT_TAG),
        digest=digest,
    )


def _split_digest(name: str, text: str) -> tuple[str, Digest | None]:
    if found := _DIGEST_TAIL.search(name):
        return name[: found.start()], Digest(found.group(1))
    if re.search(r"@[A-Za-z0-9+._-]*:", name):
        raise _malformed(text, "what follows '@' is not sha256: and 64 lower-case hex digits")
    return name, None


def _checked_tag(tag: str, text: str) -> str:
    if not _TAG.fullmatch(tag):
        raise _malformed(text, f"'{quoted(tag)}' is not a tag (letters, digits, '_', '.', '-'; at most 128)")
    return tag


def _port_fits(registry: str) -> bool:
    port = registry.rpartition("]")[2].rpartition(":")[2] if ":" in registry.rpartition("]")[2] else "1"
    return 0 < int(port) < 65536


def _why_bad_repository(path: str) -> str:
    if not path:
        return "the repository is missing"
    if path != path.lower():
        return f"the repository '{quoted(path)}' has capital letters: use '{quoted(path.lower())}'"
    if len(path) > _MAX_REPOSITORY:
        return f"the repository is longer than {_MAX_REPOSITORY} characters"
    return f"'{quoted(path)}' is not a repository (lower-case words joined by '/', '.', '_', '__' or '-')"


def _malformed(text: str, why: str) -> UsageError:
    return UsageError(f"'{quoted(text)}' is not an image name: {why}", mend=f"write {_FORMS}")
