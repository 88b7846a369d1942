"""A registry in this process that behaves as documented, and misbehaves as told."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

SERVICE = "tests"
USER, PASSWORD = "user", "hunter2-secret"
BASIC = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


@dataclass
class Fault:
    """What happens instead of the right thing, for the first `times` requests that match.

    `status` answers with it: before the body is read when `early`, and then the connection is reset.
    `cut` closes the connection after that many bytes of the body. Without either, `act` is called.
    """

    method: str
    path: str
    times: int = 1
    skip: int = 0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    early: bool = False
    cut: int | None = None
    act: Callable[[Handler], None] | None = None

    def matches(self, handler: Handler) -> bool:
        if self.times < 1 or self.method != handler.command or not re.search(self.path, handler.path):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


@dataclass(frozen=True)
class Seen:
    """A request as it came; header names in Title-Case."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class FakeRegistry:
    """`strict`: as distribution 2.8, a session dies of a cut PATCH and wants its latest Location.

    `forgetful`: as some proxies, a session is gone after its first PATCH. `login`: none, basic or bearer.
    `tokens` are issued one after the other; those in `ended` are no longer accepted.
    """

    strict: bool = False
    forgetful: bool = False
    login: str = "none"
    absolute: bool = False
    minimum: int = 0
    largest_body: int = 1 << 40
    token_life: int = 300
    realm: str = ""
    faults: list[Fault] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    sessions: dict[str, bytearray] = field(default_factory=dict)
    states: dict[str, int] = field(default_factory=dict)
    mountable: dict[str, bytes] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    busy: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __enter__(self) -> Self:
        handler = type("BoundHandler", (Handler,), {"fake": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(0.02), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def count(self, method: str, path: str = "") -> int:
        return sum(one.method == method and bool(re.search(path, one.path)) for one in self.seen)

    def settle(self) -> None:
        """Waits until no request is being served: a client that was killed leaves one behind."""
        deadline = time.monotonic() + 5
        while self.busy and time.monotonic() < deadline:
            time.sleep(0.005)

    def add_blob(self, data: bytes) -> str:
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return digest


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is part of the game."""


class Handler(BaseHTTPRequestHandler):
    fake: FakeRegistry
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        with self.fake.lock:
            self.fake.busy += 1
        try:
            self._serve()
        finally:
            with self.fake.lock:
                self.fake.busy -= 1

    def _serve(self) -> None:
        fake = self.fake
        self.body_read = False
        with fake.lock:
            fake.seen.append(
                Seen(self.command, self.path, {name.title(): value for name, value in self.headers.items()})
            )
            fault = next((fault for fault in fake.faults if fault.matches(self)), None)
        if fault:
            self._misbehave(fault)
        elif self.path.startswith("/token"):
            self._token()
        elif self._authorized():
            self._route()

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _handle  # noqa: N815

    @property
    def length(self) -> int:
        return int(self.headers.get("Content-Length") or 0)

    def read_body(self, count: int | None = None) -> bytes:
        self.body_read = True
        return self.rfile.read(self.length if count is None else min(count, self.length))

    def answer(self, status: int, body: bytes = b"", **headers: Any) -> None:
        if not self.body_read:
            self.read_body()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, status: int, code: str, message: str = "", **headers: Any) -> None:
        body = json.dumps({"errors": [{"code": code, "message": message}]}).encode()
        self.answer(status, body, Content_Type="application/json", **headers)

    def reset(self) -> None:
        """Closes as hard as a proxy that has had enough."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def _misbehave(self, fault: Fault) -> None:
        if fault.act:
            fault.act(self)
        elif fault.cut is not None:
            data = self.read_body(fault.cut)
            name = urlsplit(self.path).path.rpartition("/")[2]
            with self.fake.lock:
                if self.command == "PATCH" and self.fake.strict:
                    self.fake.sessions.pop(name, None)
                elif self.command == "PATCH" and name in self.fake.sessions:
                    self.fake.sessions[name] += data
            self.reset()
        else:
            self.body_read = fault.early
            self.answer(fault.status, fault.body, **fault.headers)
            if fault.early:
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_WR)
                self.close_connection = True

    def _authorized(self) -> bool:
        fake, given = self.fake, self.headers.get("Authorization", "")
        if fake.login == "none" or (fake.login == "basic" and given == BASIC):
            return True
        token = given.removeprefix("Bearer ")
        if fake.login == "bearer" and token in fake.tokens and token not in fake.ended:
            return True
        realm = fake.realm or f"{fake.url}/token"
        challenge = (
            'Basic realm="tests"'
            if fake.login == "basic"
            else f'Bearer realm="{realm}",service="{SERVICE}",scope="repository:a/b:pull"'
        )
        self.error(401, "UNAUTHORIZED", "authentication required", WWW_Authenticate=challenge)
        return False

    def _token(self) -> None:
        fake = self.fake
        if self.command == "POST":
            form = parse_qs(self.read_body().decode())
            allowed = form.get("refresh_token") == [PASSWORD] and form.get("grant_type") == ["refresh_token"]
        else:
            allowed = self.headers.get("Authorization") == BASIC
        if not allowed:
            self.error(401, "UNAUTHORIZED")
            return
        with fake.lock:
            fake.tokens.append(f"token-{len(fake.tokens)}")
            token = fake.tokens[-1]
        self.answer(200, json.dumps({"token": token, "expires_in": fake.token_life}).encode())

    def _route(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        found = re.fullmatch(r"/v2/(.+)/(blobs/uploads|blobs|manifests|tags)/(.*)", parts.path)
        if not found:
            self.error(404, "NAME_UNKNOWN")
            return
        _, kind, name = found.groups()
        kind = kind.replace("/", "_")
        getattr(self, f"_{self.command.lower()}_{kind}", lambda *_: self.error(405, "UNSUPPORTED"))(
            name, query
        )

    def _get_blobs(self, name: str, _: object) -> None:
        data = self.fake.blobs.get(name)
        if data is None:
            self.error(404, "BLOB_UNKNOWN")
            return
        ranged = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(ranged[1]) if ranged else 0
        extra = {"Content_Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if ranged else {}
        self.answer(206 if ranged else 200, data[start:], Content_Length=len(data) - start, **extra)

    _head_blobs = _get_blobs

    def _post_blobs_uploads(self, _: str, query: dict[str, str]) -> None:
        fake = self.fake
        if query.get("mount") in fake.mountable:
            fake.blobs[query["mount"]] = fake.mountable[query["mount"]]
            self.answer(201, Location=f"/v2/a/b/blobs/{query['mount']}")
            return
        with fake.lock:
            name = f"session-{len(fake.states)}"
            fake.sessions[name] = bytearray()
            fake.states[name] = 0
        self._session_answer(202, name)

    def _session_answer(self, status: int, name: str) -> None:
        fake = self.fake
        with fake.lock:
            fake.states[name] += 1
            size = len(fake.sessions.get(name, b""))
            location = f"/v2/a/b/blobs/uploads/{name}?_state={fake.states[name]}"
        extra = {"OCI_Chunk_Min_Length": fake.minimum} if fake.minimum else {}
        self.answer(
            status,
            Location=(fake.url if fake.absolute else "") + location,
            Range=f"0-{max(size - 1, 0)}",
            **extra,
        )

    def _session(self, name: str, query: dict[str, str]) -> bytearray | None:
        fake = self.fake
        session = fake.sessions.get(name)
        if session is not None and fake.strict and query.get("_state") != str(fake.states[name]):
            fake.sessions.pop(name)
            session = None
        if session is None:
            self.error(404, "BLOB_UPLOAD_UNKNOWN")
        return session

    def _get_blobs_uploads(self, name: str, query: dict[str, str]) -> None:
        if self._session(name, query) is not None:
            self._session_answer(204, name)

    def _delete_blobs_uploads(self, name: str, query: dict[str, str]) -> None:
        self.fake.sessions.pop(name, None)
        self.answer(204)

    def _patch_blobs_uploads(self, name: str, query: dict[str, str]) -> None:
        fake = self.fake
        if self.length > fake.largest_body:
            self.body_read = True
            self.answer(413, b"<html>413 Request Entity Too Large</html>", Content_Type="text/html")
            self.close_connection = True
            return
        session = self._session(name, query)
        if session is None:
            return
        ranged = re.fullmatch(r"(\d+)-(\d+)", self.headers.get("Content-Range", ""))
        if ranged and int(ranged[1]) != len(session):
            self.error(416, "RANGE_INVALID")
            return
        session += self.read_body()
        self._session_answer(202, name)
        if fake.forgetful:
            fake.sessions.pop(name)

    def _put_blobs_uploads(self, name: str, query: dict[str, str]) -> None:
        session = self._session(name, query)
        if session is None:
            return
        data = bytes(session + self.read_body())
        if "sha256:" + hashlib.sha256(data).hexdigest() != query["digest"]:
            self.error(400, "DIGEST_INVALID", "provided digest did not match uploaded content")
            return
        self.fake.blobs[query["digest"]] = data
        self.answer(201, Location=f"/v2/a/b/blobs/{query['digest']}", Docker_Content_Digest=query["digest"])

    def _get_manifests(self, name: str, _: object) -> None:
        if name not in self.fake.manifests:
            self.error(404, "MANIFEST_UNKNOWN", "manifest unknown")
            return
        media_type, data = self.fake.manifests[name]
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        self.answer(200, data, Content_Type=media_type, Docker_Content_Digest=digest)

    def _put_manifests(self, name: str, _: object) -> None:
        data = self.read_body()
        for layer in json.loads(data).get("layers", []):
            if layer["digest"] not in self.fake.blobs:
                self.error(400, "MANIFEST_BLOB_UNKNOWN", "blob unknown to registry")
                return
        entry = (self.headers["Content-Type"], data)
        self.fake.manifests[name] = self.fake.manifests["sha256:" + hashlib.sha256(data).hexdigest()] = entry
        self.answer(201, Location=f"/v2/a/b/manifests/{name}")

    def _get_tags(self, _: str, query: dict[str, str]) -> None:
        tags = sorted(name for name in self.fake.manifests if ":" not in name)
        start = tags.index(query["last"]) + 1 if "last" in query else 0
        page = tags[start : start + 2]
        more = (
            {"Link": f'</v2/a/b/tags/list?n=2&last={page[-1]}>; rel="next"'} if start + 2 < len(tags) else {}
        )
        self.answer(200, json.dumps({"name": "a/b", "tags": page}).encode(), **more)
