"""The errors that a person reads: what happened, where, and how to mend it.

Everything that a user can cause or meet is a `DuopackError`; any other exception is a fault of ours and
is shown with a hint to report it. Exit codes: 1 a check or a stage failed, 2 wrong use.
"""

from __future__ import annotations

import re


class DuopackError(Exception):
    """A failure in one paragraph.

    `what` is a sentence that says what happened; `where` names the file, line, address or stage;
    `mend` says what to do next.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", mend: str = "") -> None:
        self.what = without_secrets(what)
        self.where = without_secrets(where)
        self.mend = without_secrets(mend)
        super().__init__(self.what)

    def __str__(self) -> str:
        parts = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.mend:
            parts.append(f"To mend: {self.mend}")
        return " ".join(part if part.endswith((".", "!", "?")) else part + "." for part in parts)


class UsageError(DuopackError):
    """Wrong use: bad arguments or a bad models.yaml."""

    exit_code = 2


_OURS = "oci|dir|docker-archive|docker-daemon|modelscope|huggingface"
_SECRETS = (
    # What stands before the host of an address; '@sha256:' belongs to an image's name.
    (re.compile(r"(?<=://)[^\s'\"]*@(?!sha256:)"), "***@"),
    # The same without a scheme, as people write registries.
    (re.compile(rf"(?<![\w/.:-])(?!(?:{_OURS}):)[\w.+%-]+:[^\s'\"/@]+@(?!sha256:)"), "***@"),
    # Tokens and signatures in a query.
    (re.compile(r"(?<=[?&])([\w-]*(?:token|password|secret|key|signature|sig)=)[^&\s'\"]+", re.I), r"\1***"),
)


def without_secrets(text: str) -> str:
    """Text without the logins of addresses in it: what a user typed or a library said may hold some."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def quoted(text: str, limit: int = 200) -> str:
    """Text from outside, made safe to print: control characters escaped, length bounded."""
    shown = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
