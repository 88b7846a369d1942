"""A model at ModelScope, through its own client (`modelscope-hub`, which `modelscope` builds on).

The client reads MODELSCOPE_ENDPOINT, MODELSCOPE_API_TOKEN (or the login of `modelscope login`),
MODELSCOPE_CACHE and its MODELSCOPE_DOWNLOAD_* settings. It goes on with a file across processes, by
`<name>.incomplete` and a Range request. No revision is resolved to a commit: `master` may move, and only the
sha256 tells.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import DuopackError
from pipeline.files import CHUNK, FileRecord, sha256_file
from pipeline.hubs.faults import Address, disk_fault
from pipeline.hubs.hub import Listing, OnBytes, RemoteFile
from pipeline.hubs.remote import take_range

TOTAL_TIMEOUT = 7 * 24 * 3600
"""Seconds for one file. The client's own hour is too short for a 5 GB file under 1.5 MB/s; slow lines are
still noticed by its low-speed limit."""


class ModelScope:
    """A model at one revision; `master` when none is given."""

    location: Path | None = None

    def __init__(self, model: str, revision: str | None, *, parallel: int = 4) -> None:
        self.model = model
        self.revision = revision or "master"
        self.parallel = parallel

    def listing(self) -> Listing:
        """All files with size and sha256. The commit is None: ModelScope does not tell it."""
        api = self._client
        try:
            files = api.list_repo_files(self.model, "model", revision=self.revision)
            found = tuple(_remote_file(file) for file in files if file.type != "tree")
        except Exception as error:
            raise self._fault(error, Path(), None) from error
        return Listing(None, found)

    def fetch(self, files: Sequence[FileRecord], directory: Path, on_bytes: OnBytes) -> None:
        """Fetches several files at once and continues partial ones; a file of another size is refused.

        What the client's cache already holds with the right sha256 is taken from there.
        """
        api = self._client
        files = [file for file in files if not self._take_from_cache(file, directory, on_bytes)]
        # The client gets no sha256: it would fetch a changed file of 5 GB three times. The caller checks.
        wanted = [{"Path": file.path, "Size": file.size, "Type": "blob"} for file in files]
        try:
            api.download_repo(
                self.model,
                "model",
                revision=self.revision,
                local_dir=directory,
                file_list=wanted,
                max_workers=self.parallel,
                progress_callbacks=[_reporter(on_bytes)],
            )
        except Exception as error:
            path, first = _first_failure(error)
            raise self._fault(first, directory / (path or ""), path) from error

    def read_range(self, path: str, first: int, length: int) -> bytes:
        """Part of a file by a Range request; a hub or proxy that ignores it is read only as far as needed."""
        headers = {"Range": f"bytes={first}-{first + length - 1}"}
        try:
            answer = self._client.legacy.download_stream(
                self.model, "model", path, revision=self.revision, headers=headers
            )
            with answer:
                return take_range(answer.status_code, answer.iter_content(CHUNK), first, length)
        except Exception as error:
            raise self._fault(error, Path(), path) from error

    def _take_from_cache(self, file: FileRecord, directory: Path, on_bytes: OnBytes) -> bool:
        """Links or copies a file that is in MODELSCOPE_CACHE already, when it is the same."""
        from modelscope_hub.errors import CacheNotFound

        try:
            cached = self._client.download_file(
                self.model, "model", file.path, revision=self.revision, local_files_only=True
            )
            if cached.stat().st_size != file.size or sha256_file(cached) != file.sha256:
                return False
            _link_or_copy(cached.resolve(), directory / file.path)
        except (CacheNotFound, OSError):
            return False
        on_bytes(file.path, file.size)
        return True

    @functools.cached_property
    def _client(self) -> Any:
        """The client; the import is slow, and its settings are read at that moment."""
        os.environ.setdefault("MODELSCOPE_DOWNLOAD_TOTAL_TIMEOUT", str(TOTAL_TIMEOUT))
        from modelscope_hub import HubApi, HubConfig

        _silence()
        api = HubApi(HubConfig())
        try:
            # A model may be at modelscope.cn or modelscope.ai; an endpoint that the user set is kept.
            endpoint = api.resolve_endpoint_for_read(self.model)
        except Exception:
            return api  # the listing or the download will say what is wrong
        return HubApi(HubConfig(endpoint=endpoint))

    def _fault(self, error: BaseException, path: Path, file: str | None) -> DuopackError:
        import requests
        from modelscope_hub import errors

        address = Address(
            hub="ModelScope",
            endpoint=self._client._config.endpoint,
            model=self.model,
            revision=self.revision,
            endpoint_variable="MODELSCOPE_ENDPOINT",
            token_variable="MODELSCOPE_API_TOKEN",
        )
        if isinstance(error, DuopackError):
            return error
        if isinstance(error, errors.APIError) and error.status_code:
            return address.refused(error.status_code, file)
        if isinstance(error, errors.FileSizeMismatchError):
            return address.changed(file or "?", "")
        if isinstance(error, ValueError):
            return address.not_a_hub(error)
        if isinstance(error, errors.HubError | requests.RequestException):
            return address.unreachable(error)
        if isinstance(error, OSError):
            return disk_fault(error, path)
        return address.not_a_hub(error)


def _remote_file(file: Any) -> RemoteFile:
    sha256 = file.sha256
    if not isinstance(file.path, str) or not isinstance(file.size, int) or not isinstance(sha256, str | None):
        raise TypeError("a file of the listing has no path, size or sha256")
    return RemoteFile(file.path, file.size, sha256.lower() if sha256 else None)


def _reporter(on_bytes: OnBytes) -> type:
    """The client makes one of these per file and tells it the bytes that came or were taken back."""

    class Reporter:
        def __init__(self, filename: str, file_size: int) -> None:
            del file_size
            self.filename = filename

        def update(self, size: int) -> None:
            on_bytes(self.filename, size)

        def end(self) -> None:
            pass

    return Reporter


def _first_failure(error: BaseException) -> tuple[str | None, BaseException]:
    """The client tries every file and reports all failures together; the first by name speaks for them."""
    failed = getattr(error, "failed_files", None)
    if not failed:
        return None, error
    path = min(failed)
    return path, failed[path]


def _link_or_copy(source: Path, target: Path) -> None:
    """A hard link where one disk holds both, else a copy that is complete before it has its name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        partial = target.with_name(f"{target.name}.incomplete")
        shutil.copyfile(source, partial)
        partial.replace(target)


def _silence() -> None:
    """Keeps the client's bars and log lines off the terminal; MODELSCOPE_LOG_LEVEL brings the log back."""
    from modelscope_hub import _download
    from modelscope_hub.utils.logger import get_logger

    if not os.environ.get("MODELSCOPE_LOG_LEVEL"):
        get_logger().setLevel(logging.CRITICAL)
    bar = getattr(_download, "tqdm", None)
    if isinstance(bar, type):
        vars(_download)["tqdm"] = functools.partial(bar, disable=True)
