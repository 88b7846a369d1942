"""Connections: TLS, proxies, timeouts, and sending large bodies so that an early answer is heard."""

from __future__ import annotations

import errno
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError
from urllib3.util import Timeout, make_headers, wait_for_read

from pipeline.errors import DuopackError, quoted
from pipeline.oci.registry.failures import RegistryError
from pipeline.oci.registry.settings import Settings

CONNECT_SECONDS = 15.0
READ_SECONDS = 120.0
_STALL_SECONDS = 120.0


class Transport:
    """Sends one request at a time per thread; keeps connections. Neither retries, redirects nor logs in."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._managers: dict[tuple[str, str], urllib3.PoolManager] = {}
        self._connections: weakref.WeakSet[_Listening] = weakref.WeakSet()
        self._lock = threading.Lock()

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | Iterable[bytes | memoryview] | None = None,
        read_seconds: float = READ_SECONDS,
    ) -> urllib3.BaseHTTPResponse:
        """One request; the answer's body is not read yet. An iterable body needs a Content-Length header.

        Raises RegistryError (status 0) when no answer comes.
        """
        try:
            return self._manager(url).urlopen(
                method,
                url,
                body=body,
                headers={"User-Agent": self._settings.user_agent, **headers},
                redirect=False,
                retries=False,
                preload_content=False,
                decode_content=False,
                timeout=Timeout(connect=CONNECT_SECONDS, read=read_seconds),
            )
        except (HTTPError, OSError) as error:
            raise silence(error, url) from error

    def close(self) -> None:
        """Closes idle connections."""
        for manager in list(self._managers.values()):
            manager.clear()

    def abort(self) -> None:
        """Cuts every connection, also under the hands of other threads: those get RegistryError."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            if connection.sock is not None:
                with suppress(OSError):
                    # Not SSLSocket's own: that one is not safe while another thread uses it.
                    socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
        self.close()

    def _know(self, connection: _Listening) -> None:
        with self._lock:
            self._connections.add(connection)

    def _manager(self, url: str) -> urllib3.PoolManager:
        parts = urlsplit(url)
        key = (parts.scheme, parts.netloc)
        with self._lock:
            if key not in self._managers:
                self._managers[key] = self._new_manager(parts.scheme, parts.netloc, parts.hostname or "")
            return self._managers[key]

    def _new_manager(self, scheme: str, netloc: str, host: str) -> urllib3.PoolManager:
        options: dict[str, Any] = {"num_pools": 2, "maxsize": 16}
        if scheme == "https":
            options["ssl_context"] = tls_context(self._settings.certificates / netloc)
        proxy = self._settings.proxy_for(scheme, host)
        manager = _proxied(proxy, options) if proxy else urllib3.PoolManager(**options)
        told = {"tell": staticmethod(self._know)}
        manager.pool_classes_by_scheme = {
            "http": type("Pool", (_KnowingPool, HTTPConnectionPool), {"ConnectionCls": _Listening, **told}),
            "https": type(
                "Pool", (_KnowingPool, HTTPSConnectionPool), {"ConnectionCls": _ListeningSecure, **told}
            ),
        }
        return manager


class _Listening(HTTPConnection):
    """A connection that looks for an answer before each piece of a body it sends.

    A registry may refuse at once and close: going on would end in a reset, and the refusal would be lost.
    """

    _spoiled = False

    @property
    def is_connected(self) -> bool:
        return not self._spoiled and super().is_connected

    def close(self) -> None:
        self._spoiled = False
        super().close()

    def send(self, data: Any) -> None:
        if self.sock is None:
            super().send(data)
            return
        # A TLS socket may be readable for a session ticket alone: there only a failing write tells.
        if not isinstance(self.sock, ssl.SSLSocket) and wait_for_read(self.sock, timeout=0):
            self._spoiled = True
            raise BrokenPipeError(errno.EPIPE, "the server answered before the whole body was sent")
        self.sock.settimeout(_STALL_SECONDS)
        try:
            super().send(data)
        except ssl.SSLEOFError as error:
            self._spoiled = True
            raise BrokenPipeError(errno.EPIPE, "the server hung up") from error
        except OSError:
            self._spoiled = True
            raise


class _ListeningSecure(_Listening, HTTPSConnection):
    pass


class _KnowingPool:
    """A part of a connection pool that tells of each connection it makes."""

    tell: Callable[[_Listening], None]

    def _new_conn(self) -> Any:
        connection = super()._new_conn()  # type: ignore[misc]
        self.tell(connection)
        return connection


def tls_context(directory: Path) -> ssl.SSLContext:
    """The system's roots (or SSL_CERT_FILE), and docker's for the host: `*.crt` roots, `*.cert` + `*.key`."""
    context = ssl.create_default_context()
    try:
        roots, clients = sorted(directory.glob("*.crt")), sorted(directory.glob("*.cert"))
        for root in roots:
            context.load_verify_locations(cafile=root)
        for client in clients:
            context.load_cert_chain(client, client.with_suffix(".key"))
    except OSError as error:  # ssl.SSLError is one
        raise DuopackError(
            f"a certificate for this registry cannot be read: {quoted(str(error))}",
            where=str(directory),
            mend="put PEM files there: CA.crt, and client.cert with client.key",
        ) from error
    return context


def _proxied(proxy: str, options: dict[str, Any]) -> urllib3.ProxyManager:
    address = proxy if "://" in proxy else f"http://{proxy}"
    try:
        parts = urlsplit(address)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        parts, port = urlsplit(""), ""
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise DuopackError(
            "the proxy named by the environment is not an http or https address",
            mend="look at HTTPS_PROXY, HTTP_PROXY and ALL_PROXY: http://host:port",
        )
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return urllib3.ProxyManager(
        f"{parts.scheme}://{host}{port}",
        proxy_headers=make_headers(proxy_basic_auth=login) if login else None,
        **options,
    )


def silence(error: Exception, url: str) -> RegistryError:
    """The error for a request that got no answer, by its cause."""
    where = urlsplit(url).netloc.rpartition("@")[2]
    chain = _causes(error)
    text = " ".join(str(one) for one in chain).lower()
    if (
        any(isinstance(one, ssl.SSLCertVerificationError) for one in chain)
        or "certificate verify failed" in text
    ):
        return RegistryError(
            f"its TLS certificate is not trusted ({quoted(_reason(chain), 120)})",
            where=where,
            mend=f"put its CA at /etc/docker/certs.d/{where}/ca.crt, or name the CA file in SSL_CERT_FILE",
        )
    if any(isinstance(one, ssl.SSLError) for one in chain) and (
        "wrong version" in text or "record layer" in text
    ):
        return RegistryError(
            "it answers without TLS, and duopack speaks plain http only where it is asked to",
            where=where,
            mend=f"if you trust the network in between, set DUOPACK_PLAIN_HTTP={where}",
        )
    if any(isinstance(one, urllib3.exceptions.ProxyError) for one in chain):
        return RegistryError(
            f"the proxy does not let us through ({quoted(_reason(chain), 120)})",
            where=where,
            mend="look at HTTPS_PROXY, HTTP_PROXY and NO_PROXY: an internal registry belongs in NO_PROXY",
            transient=True,
        )
    if any(isinstance(one, urllib3.exceptions.NameResolutionError) for one in chain):
        return RegistryError(
            "this host name is not known here",
            where=where,
            mend="check its spelling and the network",
            transient=True,
        )
    if any(isinstance(one, urllib3.exceptions.NewConnectionError | ConnectionRefusedError) for one in chain):
        return RegistryError(
            f"nothing answers at this address ({quoted(_reason(chain), 120)})",
            where=where,
            mend="check that the registry runs, its port, and the network",
            transient=True,
        )
    if any(isinstance(one, urllib3.exceptions.TimeoutError | TimeoutError) for one in chain):
        return RegistryError(
            "no answer came in time",
            where=where,
            mend="check the network and the registry's load",
            transient=True,
        )
    return RegistryError(
        f"the connection was cut ({quoted(_reason(chain), 120)})",
        where=where,
        mend="check the network, the registry and proxies in between, then run the same command again",
        transient=not any(isinstance(one, urllib3.exceptions.LocationValueError) for one in chain),
    )


def _causes(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    waiting: list[object] = [error]
    while waiting and len(found) < 16:
        one = waiting.pop(0)
        if isinstance(one, BaseException) and one not in found:
            found.append(one)
            waiting += [one.__cause__, one.__context__, *one.args]
    return found


def _reason(chain: list[BaseException]) -> str:
    last = chain[-1]
    return (last.strerror if isinstance(last, OSError) and last.strerror else str(last)) or type(
        last
    ).__name__
