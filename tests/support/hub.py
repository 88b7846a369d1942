"""A LocalHub whose answers tests can break, and an environment in which only it is reached."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from pipeline.demo.hub import Handler, LocalHub, ServedFile


@dataclass
class Faults:
    """What goes wrong, by file name; counters go down to nothing."""

    cut_after: dict[str, int] = field(default_factory=dict)
    """The connection breaks after so many bytes of each answer."""
    cuts_left: int = 10**9
    content: dict[str, bytes] = field(default_factory=dict)
    """Served instead of the file; the listing keeps telling the file's own size and sha256."""
    content_once: dict[str, bytes] = field(default_factory=dict)
    status: int | None = None
    """Every request is answered with it."""
    file_status: dict[str, int] = field(default_factory=dict)
    slow: float = 0.0
    """Seconds between two pieces of 64 KiB."""
    extra_files: list[str] = field(default_factory=list)
    """Names in the listing that no file stands for."""
    garbage: bool = False
    """Every request is answered with a web page."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    file: str | None
    range: str | None
    authorization: str | None


class FaultyHandler(Handler):
    hub: FaultyHub  # type: ignore[misc,assignment]

    def do_GET(self) -> None:  # noqa: N802
        faults, request = self.hub.faults, self._request()
        self.hub.requests.append(request)
        status = faults.status or faults.file_status.get(request.file or "")
        if faults.garbage:
            body = b"<html>please log in</html>"
            self.send_head(200, {"Content-Type": "text/html", "Content-Length": str(len(body))})
            self.wfile.write(body)
        elif status:
            self.send_json(status, {"Code": status, "Message": "no", "Success": False, "error": "no"})
        else:
            super().do_GET()

    do_HEAD = do_GET  # noqa: N815

    def _request(self) -> Request:
        parts = urlsplit(self.path)
        file = parse_qs(parts.query).get("FilePath", [None])[0]
        if "/resolve/" in parts.path:
            file = unquote(parts.path.split("/resolve/")[1].split("/", 1)[1])
        headers = self.headers
        return Request(self.command, self.path, file, headers.get("Range"), headers.get("Authorization"))

    def send_json(self, status, value, headers=None):
        if self.hub.faults.extra_files and isinstance(value, dict) and "Data" in value:
            value["Data"]["Files"] += [
                {"Path": name, "Name": name, "Type": "blob", "Size": 3, "Sha256": "0" * 64}
                for name in self.hub.faults.extra_files
            ]
        super().send_json(status, value, headers)

    def size_of(self, file: ServedFile) -> int:
        content = self._content(file)
        return file.size if content is None else len(content)

    def content_of(self, file: ServedFile, first: int, length: int) -> Iterator[bytes]:
        content = self._content(file)
        self.hub.faults.content_once.pop(file.name, None)
        data = (file.path.read_bytes() if content is None else content)[first : first + length]
        cut = self.hub.take_cut(file.name)
        data = data if cut is None else data[:cut]
        for start in range(0, len(data), 1 << 16):
            if self.hub.faults.slow:
                time.sleep(self.hub.faults.slow)
            yield data[start : start + (1 << 16)]
            self.hub.sent(file.name, min(1 << 16, len(data) - start))
        if len(data) < length:
            self.close_connection = True

    def _content(self, file: ServedFile) -> bytes | None:
        faults = self.hub.faults
        return faults.content_once.get(file.name, faults.content.get(file.name))


class FaultyHub(LocalHub):
    """Counts what it was asked and breaks what `faults` says."""

    handler = FaultyHandler

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.faults = Faults()
        self.requests: list[Request] = []
        self.bytes_sent: dict[str, int] = {}
        self._lock = threading.Lock()

    def take_cut(self, name: str) -> int | None:
        with self._lock:
            if name not in self.faults.cut_after or self.faults.cuts_left <= 0:
                return None
            self.faults.cuts_left -= 1
            return self.faults.cut_after[name]

    def sent(self, name: str, count: int) -> None:
        with self._lock:
            self.bytes_sent[name] = self.bytes_sent.get(name, 0) + count

    def gets(self, name: str) -> list[Request]:
        return [request for request in self.requests if request.method == "GET" and request.file == name]

    def forget(self) -> None:
        self.requests.clear()
        self.bytes_sent.clear()


def client_environment(url: str, home: Path) -> dict[str, str]:
    """Variables under which both real clients know only the hub at `url` and only the directory `home`."""
    return {
        "HOME": str(home),
        "MODELSCOPE_ENDPOINT": url,
        "MODELSCOPE_CACHE": str(home / "modelscope"),
        "MODELSCOPE_HOME": str(home / "modelscope-home"),
        "MODELSCOPE_DOWNLOAD_MAX_RETRIES": "3",
        "HF_ENDPOINT": url,
        "HF_HOME": str(home / "huggingface"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


def isolate_clients(monkeypatch: pytest.MonkeyPatch, url: str, home: Path) -> None:
    """Points both clients, already imported or not, at `url`, and lets them give up at once."""
    for name, value in client_environment(url, home).items():
        monkeypatch.setenv(name, value)
    for name in ("MODELSCOPE_API_TOKEN", "HF_TOKEN", "MODELSCOPE_DOMAIN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    import modelscope_hub._download
    import modelscope_hub._legacy_api
    import modelscope_hub.config
    from huggingface_hub import constants

    monkeypatch.setattr(modelscope_hub.config, "_default_config", None)
    monkeypatch.setattr(modelscope_hub._legacy_api, "REPO_TREE_PAGE_MAX_ATTEMPTS", 1)
    monkeypatch.setattr(modelscope_hub._download, "DOWNLOAD_RETRY_TIMES", 2)
    monkeypatch.setattr(modelscope_hub._download, "DOWNLOAD_INTEGRITY_RETRY_BACKOFF", 0.01)
    monkeypatch.setattr(modelscope_hub._download, "DOWNLOAD_RETRY_MAX_DELAY_SECONDS", 0.05)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "huggingface" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "huggingface" / "token"))


def quick_sleep(monkeypatch: pytest.MonkeyPatch, *modules: object) -> None:
    """Makes the given modules' `time.sleep` short: the clients wait seconds between attempts."""
    for module in modules:
        monkeypatch.setattr(module.time, "sleep", _shorter(time.sleep))  # type: ignore[attr-defined]


def _shorter(sleep: Callable[[float], None]) -> Callable[[float], None]:
    return lambda seconds: sleep(min(seconds, 0.01))
