"""Digests: `sha256:` and 64 hex digits (OCI image-spec, descriptor.md, "Digests")."""

from __future__ import annotations

import hashlib
import re

from pipeline.errors import DuopackError, quoted

_FORM = re.compile(r"sha256:[0-9a-f]{64}")


class Digest(str):
    """A checked sha256 digest in its text form. Raises DuopackError for any other text."""

    __slots__ = ()

    def __new__(cls, text: str) -> Digest:
        if not _FORM.fullmatch(text):
            raise DuopackError(
                f"'{quoted(text)}' is not a sha256 digest", mend="expected sha256: and 64 hex digits"
            )
        return super().__new__(cls, text)

    @property
    def hex(self) -> str:
        return self[7:]

    @classmethod
    def of(cls, data: bytes) -> Digest:
        """The digest of bytes in memory."""
        return cls("sha256:" + hashlib.sha256(data).hexdigest())
