"""One repository of a registry: requests with the login, retries and redirects that belong to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from urllib.parse import SplitResult, urljoin, urlsplit, urlunsplit

import urllib3
from urllib3.exceptions import HTTPError

from pipeline.errors import DuopackError
from pipeline.oci.digest import Digest
from pipeline.oci.registry.auth import Authenticator
from pipeline.oci.registry.credentials import find_credentials
from pipeline.oci.registry.failures import Answer, RegistryError, is_transient, refusal
from pipeline.oci.registry.patience import Patience
from pipeline.oci.registry.settings import Settings
from pipeline.oci.registry.transport import READ_SECONDS, Transport, silence

Pieces = Iterable[bytes | memoryview]

_MAX_REDIRECTS = 5
_MAX_ERROR_BODY = 64 << 10
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class Client:
    """Talks to `registry` about `repository`.

    `push` asks for the right to write, `mount_from` for the right to read those repositories too. `stop`, once
    set, ends all waiting.
    Every method raises RegistryError, in a sentence that begins with `doing`.
    """

    def __init__(
        self,
        registry: str,
        repository: str,
        settings: Settings,
        *,
        push: bool = False,
        mount_from: tuple[str, ...] = (),
        patience: Patience | None = None,
    ) -> None:
        self.registry = registry
        self.repository = repository
        self.stop = threading.Event()
        self.patience = patience or Patience(sleep=self.stop.wait)
        self._base = settings.base_url(registry)
        self._transport = Transport(settings)
        self._auth = Authenticator(
            registry,
            settings,
            (
                f"repository:{repository}:pull{',push' if push else ''}",
                *(f"repository:{other}:pull" for other in mount_from),
            ),
            lambda: find_credentials(registry, repository, settings.auth_files),
            self._ask_token_server,
        )

    def url(self, path: str) -> str:
        """The address of something in this repository, e.g. `blobs/sha256:…`."""
        return f"{self._base}/v2/{self.repository}/{path}"

    def ask(
        self,
        method: str,
        url: str,
        doing: str,
        *,
        expect: tuple[int, ...],
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        limit: int = _MAX_ERROR_BODY,
        read_seconds: float = READ_SECONDS,
        retry: bool = True,
    ) -> Answer:
        """A request that may be repeated, with an answer of at most `limit` bytes.

        Follows redirects of GET and HEAD. Any status that is not in `expect` is a RegistryError.
        """

        def once() -> Answer:
            with self._follow(method, url, headers or {}, body, read_seconds) as opened:
                answer = opened.read(limit)
            if answer.status not in expect or (answer.is_html and answer.status < 300):
                raise refusal(answer, doing, self.registry)
            return answer

        return self.patience.run(once) if retry else once()

    def send(
        self,
        method: str,
        url: str,
        make_body: Callable[[], Pieces],
        length: int,
        headers: Mapping[str, str] | None = None,
        read_seconds: float = READ_SECONDS,
    ) -> Answer:
        """One large body of `length` bytes, sent once; again from its start only when the login had ended.

        Returns the answer whatever its status; raises RegistryError (status 0) when none comes.
        """
        sized = {"Content-Type": "application/octet-stream", "Content-Length": str(length), **(headers or {})}
        for is_last in (False, True):
            used = self._login_for(url)
            with self._open(method, url, sized, used, make_body(), read_seconds) as opened:
                answer = opened.read(_MAX_ERROR_BODY)
            if is_last or answer.status != 401 or not self._may_log_in(url, answer, used):
                break
        return answer

    def open(self, url: str, doing: str, *, expect: tuple[int, ...], headers: Mapping[str, str]) -> Opened:
        """A GET whose body the caller reads and closes."""

        def once() -> Opened:
            opened = self._follow("GET", url, headers, None, READ_SECONDS)
            if opened.status in expect:
                return opened
            with opened:
                raise refusal(opened.read(_MAX_ERROR_BODY), doing, self.registry)

        return self.patience.run(once)

    def has_blob(self, digest: Digest, size: int) -> bool:
        """Whether the repository holds a blob; one of another size than `size` does not count."""
        doing = f"looking for a blob in {self.repository}"
        answer = self.ask("HEAD", self.url(f"blobs/{digest}"), doing, expect=(200, 404))
        return answer.status == 200 and answer.header("Content-Length") in {"", str(size)}

    def cancel(self, location: str) -> None:
        """Closes an upload session; when that fails the registry will do it in its own time."""
        with suppress(DuopackError):
            self.ask(
                "DELETE",
                location,
                "cancelling an upload",
                expect=(200, 202, 204),
                retry=False,
                read_seconds=10,
            )

    def is_place(self, url: str) -> bool:
        """Whether an address that was kept in a file belongs to this registry: no other gets our requests."""
        return resolved_address(self._base, url) is not None and self._is_ours(url)

    def locate(self, answer: Answer, base: str) -> str:
        """The absolute address in an answer's Location header; `base` is the address that was asked.

        A proxy that ends TLS often makes a registry name itself with http or its inner port: as long as the
        host is the registry's, its known address is used. Raises RegistryError for no address, or a bad one.
        """
        location = answer.header("Location")
        found, ours = resolved_address(base, location) if location else None, urlsplit(self._base)
        if found is None:
            raise RegistryError(
                "it began an upload without saying where",
                where=self.registry,
                mend="look at the registry's log",
            )
        if found.hostname == ours.hostname and found.scheme != ours.scheme:
            found = found._replace(scheme=ours.scheme, netloc=ours.netloc)
        if found.scheme == "http" and ours.scheme == "https":
            raise RegistryError(
                "it wants the upload sent to another host without TLS",
                where=self.registry,
                mend="its external address is set wrongly: ask who runs it",
            )
        return urlunsplit(found)

    def abort(self) -> None:
        """Ends what other threads are doing with this client, soon and with an error."""
        self.stop.set()
        self._transport.abort()

    def close(self) -> None:
        """Lets go of idle connections."""
        self._transport.close()

    def _follow(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, read_seconds: float
    ) -> Opened:
        tried_login = False
        for _ in range(_MAX_REDIRECTS + 2):
            used = self._login_for(url)
            opened = self._open(method, url, headers, used, body, read_seconds)
            if opened.status == 401 and not tried_login:
                tried_login = True
                with opened:
                    answer = opened.read(_MAX_ERROR_BODY)
                if not self._may_log_in(url, answer, used):
                    return Opened(None, answer)
            elif opened.status in _REDIRECTS and method in {"GET", "HEAD"}:
                with opened:
                    url = self._redirected(url, opened.read(_MAX_ERROR_BODY))
            else:
                return opened
        raise RegistryError(
            "it redirects without end", where=self.registry, mend="look at proxies in between"
        )

    def _redirected(self, url: str, answer: Answer) -> str:
        target = resolved_address(url, answer.header("Location"))
        if target is None or urlunsplit(target) == url:
            raise RegistryError(
                "it redirects to nowhere", where=self.registry, mend="look at proxies in between"
            )
        return urlunsplit(target)

    def _open(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        login: str | None,
        body: bytes | Pieces | None,
        read_seconds: float,
    ) -> Opened:
        sent = {"Accept-Encoding": "identity", **headers}
        if login:
            sent["Authorization"] = login
        response = self._transport.send(method, url, sent, body, read_seconds)
        return Opened(response, Answer(response.status, response.headers, b"", url))

    def _login_for(self, url: str) -> str | None:
        return self._auth.header() if self._is_ours(url) else None

    def _may_log_in(self, url: str, answer: Answer, used: str | None) -> bool:
        return self._is_ours(url) and self._auth.learn(answer, used)

    def _is_ours(self, url: str) -> bool:
        return _origin(self._base) == _origin(url)

    def _ask_token_server(self, method: str, url: str, headers: dict[str, str], body: bytes | None) -> Answer:
        def once() -> Answer:
            with self._open(method, url, headers, None, body, READ_SECONDS) as opened:
                answer = opened.read(_MAX_ERROR_BODY * 4)
            if is_transient(answer.status):
                raise refusal(answer, "asking its token server for access", self.registry)
            return answer

        return self.patience.run(once)


def resolved_address(base: str, target: str) -> SplitResult | None:
    """An address from outside, made absolute, without login and fragment; None when it is not http or https."""
    try:
        parts = urlsplit(urljoin(base, target))
        is_address = target.isprintable() and parts.scheme in {"http", "https"} and parts.hostname
        if not is_address or parts.port == 0:
            return None
    except ValueError:
        return None
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="")


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


class Opened:
    """An answer whose body is still on the wire."""

    def __init__(self, response: urllib3.BaseHTTPResponse | None, answer: Answer) -> None:
        self._response = response
        self._answer = answer
        self._is_read = False
        self.status = answer.status

    def header(self, name: str) -> str:
        return self._answer.header(name)

    def read(self, limit: int) -> Answer:
        """The answer with at most `limit` bytes of its body."""
        if self._response is None:
            return self._answer
        body = b"".join(self.pieces(limit))
        return Answer(self.status, self._answer.headers, body[:limit], self._answer.url)

    def pieces(self, limit: int, size: int = 1 << 20) -> Iterable[bytes]:
        """The body piece by piece, until its end or until more than `limit` bytes have come.

        Raises RegistryError when the connection is cut.
        """
        assert self._response is not None
        count = 0
        try:
            while count <= limit:
                piece = self._response.read(size)
                if not piece:
                    self._is_read = True
                    return
                count += len(piece)
                yield piece
        except (HTTPError, OSError) as error:
            raise silence(error, self._answer.url) from error

    def __enter__(self) -> Opened:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Keeps the connection for the next request when the body was read to its end, else closes it."""
        if self._response is not None:
            self._response.release_conn() if self._is_read else self._response.close()
