"""A hub on this machine: serves models from a directory as ModelScope and as Hugging Face do.

It answers what the real clients ask when they list and download a model, on 127.0.0.1 only:
- ModelScope: /api/v1/models/OWNER/NAME/repo/files and /api/v1/models/OWNER/NAME/repo?FilePath=…
- Hugging Face: /api/models/OWNER/NAME/revision/REV, …/tree/REV and /OWNER/NAME/resolve/REV/PATH
Ranges are honoured. The revisions are `master`, `main` and the commit, which is made from the files' content.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import parse_qs, unquote, urlsplit

from pipeline.files import CHUNK, sha256_file

BRANCHES = frozenset({"master", "main"})
REPO = r"/(?P<repo>[^/]+/[^/]+)"
RANGE = re.compile(r"bytes=(?P<first>[0-9]+)-(?P<last>[0-9]*)")


@dataclass(frozen=True)
class ServedFile:
    """One file of a served model."""

    name: str
    path: Path
    size: int
    sha256: str

    @property
    def in_lfs(self) -> bool:
        """Hugging Face keeps weights and large files in LFS, and tells the sha256 of those only."""
        return self.size > 1 << 20 or self.name.endswith(".safetensors")


class Server(ThreadingHTTPServer):
    """A client that leaves in the middle of an answer is no error of the server."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class LocalHub:
    """Serves `root`/OWNER/NAME/… while the `with` block lasts; `url` is the endpoint for either client."""

    handler: ClassVar[type[Handler]]

    def __init__(self, root: Path) -> None:
        self.root = root
        self._hashes: dict[tuple[Path, int, int], str] = {}
        self._server: ThreadingHTTPServer | None = None

    def __enter__(self) -> Self:
        # The server makes a handler per connection; this class is one that knows its hub.
        bound = type("BoundHandler", (self.handler,), {"hub": self})
        self._server = Server(("127.0.0.1", 0), bound)
        threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="local-hub", daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()

    @property
    def url(self) -> str:
        assert self._server is not None, "the hub serves only inside its with block"
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def files(self, repo: str) -> dict[str, ServedFile] | None:
        """A model's files by name, or None when there is no such model."""
        directory = self.root / repo
        if ".." in repo.split("/") or not directory.is_dir():
            return None
        return {file.name: file for file in self._walk(directory)}

    def _walk(self, directory: Path) -> Iterator[ServedFile]:
        for path in sorted(directory.rglob("*")):
            if path.is_file() and not path.is_symlink():
                stat = path.stat()
                yield ServedFile(
                    path.relative_to(directory).as_posix(), path, stat.st_size, self._sha256(path)
                )

    def _sha256(self, path: Path) -> str:
        stat = path.stat()
        key = (path, stat.st_size, stat.st_mtime_ns)
        if key not in self._hashes:
            self._hashes[key] = sha256_file(path)
        return self._hashes[key]


def commit_of(files: dict[str, ServedFile]) -> str:
    """A commit id made from names and content, 40 hex digits as git's."""
    text = "".join(f"{file.sha256} {file.name}\n" for file in files.values())
    return hashlib.sha256(text.encode()).hexdigest()[:40]


class Handler(BaseHTTPRequestHandler):
    """Answers one connection. Its small methods are where a subclass lets things go wrong."""

    hub: ClassVar[LocalHub]
    protocol_version = "HTTP/1.1"
    routes: ClassVar[tuple[tuple[str, str], ...]] = (
        (rf"/api/v1/models{REPO}/repo/files", "modelscope_list"),
        (rf"/api/v1/models{REPO}/repo", "modelscope_file"),
        (rf"/api/models{REPO}/revision/(?P<revision>.+)", "huggingface_revision"),
        (rf"/api/models{REPO}/tree/(?P<revision>[^/]+)", "huggingface_tree"),
        (rf"{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "huggingface_file"),
    )

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        for pattern, name in self.routes:
            if match := re.fullmatch(pattern, unquote(parts.path)):
                getattr(self, name)(**match.groupdict(), query=query)
                return
        self.send_json(404, {"Code": 404, "Message": "no such address", "Success": False})

    do_HEAD = do_GET  # noqa: N815

    def modelscope_list(self, repo: str, query: dict[str, str]) -> None:
        files = self.hub.files(repo)
        if files is None or query.get("Revision", "master") not in BRANCHES:
            self.modelscope_missing()
            return
        root = query.get("Root", "").strip("/")
        listed = [file for file in files.values() if not root or file.name.startswith(f"{root}/")]
        directories = {parent for file in listed for parent in Path(file.name).parents if parent.name}
        entries: list[dict[str, Any]] = [
            {"Path": parent.as_posix(), "Name": parent.name, "Type": "tree", "Size": 0, "Sha256": ""}
            for parent in sorted(directories)
        ]
        entries += [
            {
                "Path": file.name,
                "Name": Path(file.name).name,
                "Type": "blob",
                "Size": file.size,
                "Sha256": file.sha256,
                "Revision": "",
                "IsLFS": file.in_lfs,
            }
            for file in listed
        ]
        self.send_json(200, {"Code": 200, "Success": True, "Data": {"Files": entries}})

    def modelscope_file(self, repo: str, query: dict[str, str]) -> None:
        file = (self.hub.files(repo) or {}).get(query.get("FilePath", ""))
        if file is None or query.get("Revision", "master") not in BRANCHES:
            self.modelscope_missing()
            return
        self.send_content(file, {})

    def modelscope_missing(self) -> None:
        self.send_json(
            404, {"Code": 10010205001, "Message": "the model or file does not exist", "Success": False}
        )

    def huggingface_revision(self, repo: str, revision: str, **_: Any) -> None:
        if (files := self.at_revision(repo, revision)) is None:
            return
        siblings = [{"rfilename": name} for name in files]
        self.send_json(200, {"id": repo, "modelId": repo, "sha": commit_of(files), "siblings": siblings})

    def huggingface_tree(self, repo: str, revision: str, **_: Any) -> None:
        if (files := self.at_revision(repo, revision)) is None:
            return
        self.send_json(200, [_tree_entry(file) for file in files.values()])

    def huggingface_file(self, repo: str, revision: str, path: str, **_: Any) -> None:
        if (files := self.at_revision(repo, revision)) is None:
            return
        if path not in files:
            self.send_json(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        file = files[path]
        headers = {"X-Repo-Commit": commit_of(files), "ETag": f'"{_git_id(file)}"'}
        if file.in_lfs:
            headers |= {"X-Linked-ETag": f'"{file.sha256}"', "X-Linked-Size": str(file.size)}
        self.send_content(file, headers)

    def at_revision(self, repo: str, revision: str) -> dict[str, ServedFile] | None:
        """The model's files; when there are none it has answered 404 itself."""
        files = self.hub.files(repo)
        if files is None:
            self.send_json(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif revision not in BRANCHES | {commit_of(files)}:
            self.send_json(404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"})
        else:
            return files
        return None

    def send_content(self, file: ServedFile, headers: dict[str, str]) -> None:
        """A file, or the rest of it that a Range asks for."""
        size = self.size_of(file)
        match = RANGE.fullmatch(self.headers.get("Range", ""))
        first = int(match["first"]) if match else 0
        last = min(int(match["last"] or size - 1), size - 1) if match else size - 1
        if match and first >= size:
            self.send_head(416, {"Content-Range": f"bytes */{size}", "Content-Length": "0"})
            return
        if match:
            headers = {**headers, "Content-Range": f"bytes {first}-{last}/{size}"}
        length = last - first + 1
        kind = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        self.send_head(206 if match else 200, {**headers, **kind, "Content-Length": str(length)})
        if self.command == "GET":
            with suppress(ConnectionError):
                for piece in self.content_of(file, first, length):
                    self.wfile.write(piece)

    def size_of(self, file: ServedFile) -> int:
        return file.size

    def content_of(self, file: ServedFile, first: int, length: int) -> Iterator[bytes]:
        with file.path.open("rb") as stream:
            stream.seek(first)
            while length and (piece := stream.read(min(CHUNK, length))):
                length -= len(piece)
                yield piece

    def send_json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        kind = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        self.send_head(status, {**(headers or {}), **kind})
        if self.command == "GET":
            self.wfile.write(body)

    def send_head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """The demo's terminal belongs to the demo."""


LocalHub.handler = Handler


def _tree_entry(file: ServedFile) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": _git_id(file), "size": file.size, "path": file.name}
    if file.in_lfs:
        entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": 134}
    return entry


def _git_id(file: ServedFile) -> str:
    """An id of 40 hex digits for the content. Git's own is over the bytes; clients only compare it."""
    return hashlib.sha256(file.sha256.encode()).hexdigest()[:40]
