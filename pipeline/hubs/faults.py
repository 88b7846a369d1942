"""A hub's failures in words: what happened, where, and what to do; never a token or a signed URL."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import DuopackError, quoted
from pipeline.files import disk_errors


@dataclass(frozen=True)
class Address:
    """A model at a hub, and the names by which a user sets how the hub is reached."""

    hub: str
    endpoint: str
    model: str
    revision: str
    endpoint_variable: str
    token_variable: str

    @property
    def where(self) -> str:
        """The model's address without user name, password or query."""
        # By hand: what a user set may be no address at all.
        scheme, mark, rest = re.split(r"[?#]", self.endpoint)[0].rpartition("://")
        login_and_host, slash, path = rest.partition("/")
        host = login_and_host.rpartition("@")[2]
        return quoted(f"{scheme}{mark}{f'{host}{slash}{path}'.rstrip('/')}/{self.model}")

    def refused(self, status: int, file: str | None = None) -> DuopackError:
        """The fault behind an HTTP status of 400 or more."""
        what, mend = self._words(status, f"'{quoted(file)}' of {self.model}" if file else self.model)
        return DuopackError(what, where=self.where, mend=mend)

    def unreachable(self, error: BaseException) -> DuopackError:
        """No answer, or one that broke off, after the client's own attempts."""
        return DuopackError(
            f"cannot reach {self.hub}: {reason(error)}",
            where=self.where,
            mend=f"check the network and the proxy, or name another address in {self.endpoint_variable}; "
            "then run the same command again: what is complete is kept",
        )

    def not_a_hub(self, error: BaseException) -> DuopackError:
        """An answer that is not the hub's: a login page of a proxy, or another service."""
        return DuopackError(
            f"the answer is not that of {self.hub} ({type(error).__name__})",
            where=self.where,
            mend=f"check {self.endpoint_variable} and the proxy settings",
        )

    def changed(self, file: str, detail: str) -> DuopackError:
        """A file whose size is not the locked one."""
        return DuopackError(
            f"the hub serves '{quoted(file)}' with another size than the lock says{detail}",
            where=self.where,
            mend="if the model was updated, run 'duopack lock --update'; if the hub's copy is damaged, "
            "try again later or take another source",
        )

    def _words(self, status: int, subject: str) -> tuple[str, str]:
        if status in {401, 403}:
            return (
                f"{self.hub} refuses access to {subject} ({status})",
                f"check the id; for a gated model accept its terms there and set {self.token_variable}",
            )
        if status == 404:
            return (
                f"{self.hub} has no {subject} at revision {quoted(self.revision)} (404)",
                f"check id and revision in models.yaml; for a private model set {self.token_variable}",
            )
        if status == 429:
            return (
                f"{self.hub} takes no more requests for now (429)",
                f"wait some minutes and run the same command again; {self.token_variable} raises the limit",
            )
        if status >= 500:
            return (
                f"{self.hub} failed with status {status} for {subject}",
                f"run the same command again later, or name another address in {self.endpoint_variable}",
            )
        return (
            f"{self.hub} answered {status} for {subject}",
            f"check the model's id and {self.endpoint_variable}",
        )


def reason(error: BaseException) -> str:
    """The cause at the bottom of an exception in safe words: the system's own text, or the type's name."""
    seen: list[BaseException] = []
    last = type(error).__name__
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        if isinstance(current, socket.gaierror):
            return "the host name is not known"
        if isinstance(current, TimeoutError):
            return "no answer in time"
        if isinstance(current, OSError) and current.errno and current.strerror:
            return current.strerror.lower()
        last = type(current).__name__
        current = _below(current)
    return last


def _below(error: BaseException) -> BaseException | None:
    """The next exception down: urllib3's `reason`, requests' arguments, else the context."""
    inner = getattr(error, "reason", None)
    candidates = (inner, *error.args, error.__cause__, error.__context__)
    return next((item for item in candidates if isinstance(item, BaseException)), None)


def disk_fault(error: OSError, path: Path) -> DuopackError:
    """The fault behind a client's failure to write `path`."""
    try:
        with disk_errors(path):
            raise error
    except DuopackError as fault:
        return fault
    except OSError:
        words = os.strerror(error.errno) if error.errno else type(error).__name__
        return DuopackError(f"cannot write: {words}", where=str(path), mend="check the disk and the path")


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turns an OSError while `path` is read into a DuopackError."""
    try:
        yield
    except OSError as error:
        words = os.strerror(error.errno) if error.errno else type(error).__name__
        raise DuopackError(
            f"cannot read: {words}",
            where=quoted(str(error.filename or path)),
            mend="check that it is there, who owns it and its mode",
        ) from error
