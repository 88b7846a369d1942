"""What can go wrong with a registry, each kind in its own sentence with its own mend.

Error codes are those of distribution-spec 1.1, "Error Codes". Text from a registry is quoted, never trusted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.errors import quoted
from pipeline.oci.registry.patience import PostponedError, retry_after

_TRY_LATER = "run the same command again later: what the registry already has is not sent again"
_FULL = re.compile(
    rb"no space left|disk quota exceeded|insufficient storage|\"Err\": ?(?:28|122)\b", re.IGNORECASE
)


@dataclass(frozen=True)
class Answer:
    """A registry's answer with its (bounded) body. Header names are found in any case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str

    def header(self, name: str) -> str:
        return self.headers.get(name) or ""

    @property
    def is_html(self) -> bool:
        start = self.body[:512].lstrip().lower()
        return "html" in self.header("Content-Type").lower() or start.startswith(
            (b"<!doctype html", b"<html")
        )

    @property
    def errors(self) -> tuple[tuple[str, str], ...]:
        """(code, message) pairs of an OCI error body; empty for anything else."""
        try:
            found = json.loads(self.body)["errors"]
            return tuple((str(e.get("code", "")).upper(), str(e.get("message", ""))) for e in found[:10])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return ()


class RegistryError(PostponedError):
    """A registry's refusal (`status` is HTTP's) or silence (`status` 0).

    `transient` says that the same request may well succeed later; `retry_after` is in seconds.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        mend: str = "",
        status: int = 0,
        codes: tuple[str, ...] = (),
        transient: bool = False,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(what, where=where, mend=mend)
        self.status = status
        self.codes = codes
        self.transient = transient
        self.retry_after = retry_after


def is_transient(status: int) -> bool:
    """Statuses after which the same request may succeed: 408, 429, and a server's own faults."""
    return status in {408, 429, 500, 502, 503, 504}


def refusal(answer: Answer, doing: str, registry: str) -> RegistryError:
    """The error for an answer that is not what was asked for. `doing` is a noun: 'reading a:b'."""
    codes = tuple(code for code, _ in answer.errors)
    what, mend = _sentence(answer, codes, doing, registry)
    said = _said(answer)
    full = _is_full(answer)
    return RegistryError(
        f"{what} ({said})" if said else what,
        where=registry,
        mend=mend,
        status=answer.status,
        codes=codes,
        transient=is_transient(answer.status) and not full,
        retry_after=retry_after(answer.header("Retry-After")),
    )


def _sentence(answer: Answer, codes: tuple[str, ...], doing: str, registry: str) -> tuple[str, str]:
    status = answer.status
    login = f"run `docker login {registry}` with an account that may do this"
    if _is_full(answer):
        return (
            f"the registry's disk is full: {doing} failed",
            "free space at the registry, then run the same command again",
        )
    if status == 401 or "UNAUTHORIZED" in codes:
        return f"{doing} needs a login, or the login is not accepted", login
    if status == 413:
        return f"{doing} was refused as too large", _size_mend(answer)
    if status == 429 or "TOOMANYREQUESTS" in codes:
        return f"the registry limits the rate of requests: {doing} was put off", f"wait, or {login}"
    if "DIGEST_INVALID" in codes:
        return (
            f"{doing}: the registry received other bytes than were sent",
            "look for a proxy that changes or cuts uploads, and for a faulty disk or memory, then try again",
        )
    if "MANIFEST_BLOB_UNKNOWN" in codes or "BLOB_UNKNOWN" in codes:
        return f"{doing}: a blob of the image is not in the registry", _TRY_LATER
    if status in {403, 451} or "DENIED" in codes:
        return f"the registry does not allow {doing}", f"check the account's rights there, or {login}"
    if status == 404 and not codes and answer.is_html:
        return "what answers here is a web site, not a registry", "check the host and port in the image name"
    if status == 404 or not {"NAME_UNKNOWN", "MANIFEST_UNKNOWN"}.isdisjoint(codes):
        return f"{doing}: the registry knows no such thing", "check the repository, the tag and the spelling"
    if 200 <= status < 300 and answer.is_html:
        return (
            f"what answers here is a web page, not a registry: {doing} failed",
            "check the host and port in the image name, and for a login portal or proxy in between",
        )
    if status in {405, 415} or "UNSUPPORTED" in codes:
        return (
            f"the registry does not support {doing} (HTTP {status})",
            "it may be a read-only mirror or an old version: choose another destination",
        )
    if "MANIFEST_INVALID" in codes:
        return f"the registry finds the manifest invalid: {doing} failed", "it may not take this image format"
    if status >= 500:
        return (
            f"the registry has a fault of its own (HTTP {status}): {doing} failed",
            f"look at its log, or {_TRY_LATER}",
        )
    return f"the registry answered HTTP {status} to {doing}", "look at the registry's log"


def _size_mend(answer: Answer) -> str:
    if answer.errors:
        return "the registry has a limit for one layer: raise it there, or choose one that takes large layers"
    return (
        "a proxy before the registry limits the size of one request: raise it "
        "(nginx: client_max_body_size 0), or push to the registry's own address"
    )


def _said(answer: Answer) -> str:
    return "; ".join(
        quoted(f"{code}: {message}" if message else code, 160)
        for code, message in answer.errors[:2]
        if code or message
    )


def _is_full(answer: Answer) -> bool:
    return answer.status == 507 or (answer.status >= 500 and bool(_FULL.search(answer.body)))
