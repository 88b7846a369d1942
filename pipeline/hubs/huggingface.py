"""A model at Hugging Face, through `huggingface_hub`.

The client reads HF_TOKEN (or the login of `hf auth login`), HF_HUB_CACHE, HF_HUB_OFFLINE and the like when it
is imported; HF_ENDPOINT is read here when the hub is opened, and passed on. What it does, as of 2.4.0:
- It retries a broken connection and goes on with a Range request, but only within one process: what a killed
  process had of a file is thrown away. A complete file is kept, and one in its cache is copied from there.
- It checks sizes, not sha256; the caller does. Small files (outside LFS) have no sha256 in the listing.
- It refuses files over 50 GB over plain HTTP; with `hf-xet`, which its usual companion, it takes them.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pipeline.errors import DuopackError
from pipeline.files import CHUNK, FileRecord
from pipeline.hubs.faults import Address, disk_fault
from pipeline.hubs.hub import Listing, OnBytes, RemoteFile
from pipeline.hubs.remote import take_range

if TYPE_CHECKING:
    from huggingface_hub import HfApi

DEFAULT_ENDPOINT = "https://huggingface.co"


class HuggingFace:
    """A model at one revision, `main` when none is given, or at the commit that the lock holds."""

    location: Path | None = None

    def __init__(
        self, model: str, revision: str | None, *, commit: str | None = None, parallel: int = 4
    ) -> None:
        self.model = model
        self.revision = commit or revision or "main"
        """What is asked for; after `listing` the commit, so that a fetch belongs to what was listed."""
        self.parallel = parallel
        self._endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None

    def listing(self) -> Listing:
        """All files of the commit that the revision stands for now; sha256 only for files in LFS."""
        from huggingface_hub import RepoFile

        try:
            commit = self._api.model_info(self.model, revision=self.revision).sha
            if not isinstance(commit, str):
                raise TypeError("the model has no commit")
            tree = self._api.list_repo_tree(self.model, recursive=True, revision=commit)
            files = tuple(_remote_file(entry) for entry in tree if isinstance(entry, RepoFile))
        except Exception as error:
            raise self._fault(error, Path(), None) from error
        self.revision = commit
        return Listing(commit, files)

    def fetch(self, files: Sequence[FileRecord], directory: Path, on_bytes: OnBytes) -> None:
        """Fetches several files at once; the first failure stops the others."""
        _ = self._api  # sets the client up before its threads start
        _remove_leftovers(directory)
        stop = threading.Event()
        with ThreadPoolExecutor(self.parallel, thread_name_prefix="huggingface") as pool:
            futures = {pool.submit(self._fetch_one, file, directory, on_bytes, stop): file for file in files}
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
                _raise_first(futures)
            finally:
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)

    def read_range(self, path: str, first: int, length: int) -> bytes:
        """Part of a file by a Range request; a hub or proxy that ignores it is read only as far as needed."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._http import hf_raise_for_status

        url = hf_hub_url(self.model, path, revision=self.revision, endpoint=self._endpoint)
        headers = {**build_hf_headers(), "Range": f"bytes={first}-{first + length - 1}"}
        try:
            _ = self._api
            with get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
                hf_raise_for_status(answer)
                return take_range(answer.status_code, answer.iter_bytes(CHUNK), first, length)
        except Exception as error:
            raise self._fault(error, Path(), path) from error

    def _fetch_one(self, file: FileRecord, directory: Path, on_bytes: OnBytes, stop: threading.Event) -> None:
        counted = 0

        def count(more: int) -> None:
            nonlocal counted
            counted += more
            on_bytes(file.path, more)

        try:
            try:
                self._download(file, directory, _meter(count, stop))
            except (AttributeError, RuntimeError):
                # Threads share a client, and one whose connection fails closes it under the others, which then
                # break inside of it. A second attempt has a new client, and fails with the hub's own reason.
                on_bytes(file.path, -counted)
                self._download(file, directory, _meter(count, stop))
        except _StoppedError:
            raise
        except Exception as error:
            raise self._fault(error, directory / file.path, file.path) from error

    def _download(self, file: FileRecord, directory: Path, meter: Any) -> None:
        from huggingface_hub import hf_hub_download

        hf_hub_download(
            self.model,
            file.path,
            revision=self.revision,
            local_dir=directory,
            endpoint=self._endpoint,
            tqdm_class=meter,
        )

    @functools.cached_property
    def _api(self) -> HfApi:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import logging as client_logging

        # Its retries and its doubts about the disk would write between the bars; failures come as exceptions.
        client_logging.set_verbosity(logging.CRITICAL)
        warnings.filterwarnings("ignore", module="huggingface_hub")
        return HfApi(endpoint=self._endpoint)

    def _fault(self, error: BaseException, path: Path, file: str | None) -> DuopackError:
        import httpx2
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

        address = Address(
            hub="Hugging Face",
            endpoint=self._endpoint or DEFAULT_ENDPOINT,
            model=self.model,
            revision=self.revision,
            endpoint_variable="HF_ENDPOINT",
            token_variable="HF_TOKEN",
        )
        cause = error
        if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
            cause = error.__cause__  # the client's word for "not in the cache, and the hub gave this error"
        if isinstance(cause, OfflineModeIsEnabled):
            return DuopackError(
                "HF_HUB_OFFLINE is set, but files must be fetched",
                where=address.where,
                mend="unset HF_HUB_OFFLINE",
            )
        if isinstance(cause, HfHubHTTPError) and cause.response is not None:
            return address.refused(cause.response.status_code, file)
        if isinstance(cause, httpx2.HTTPError):
            return address.unreachable(cause)
        if isinstance(cause, ValueError) and "too large" in str(cause):
            return DuopackError(
                f"'{file}' is over 50 GB, which the client does not fetch over plain HTTP",
                where=address.where,
                mend="pip install hf-xet, or take the model from ModelScope",
            )
        if isinstance(cause, OSError) and "Consistency check failed" in str(cause):
            return address.changed(file or "?", "")
        if isinstance(cause, OSError) and cause.errno:
            return disk_fault(cause, path)
        return address.not_a_hub(cause)


class _StoppedError(Exception):
    """Another file failed, or the user interrupted."""


def _remote_file(entry: Any) -> RemoteFile:
    size = entry.lfs.size if entry.lfs else entry.size
    if not isinstance(entry.path, str) or not isinstance(size, int):
        raise TypeError("a file of the listing has no path or size")
    return RemoteFile(entry.path, size, entry.lfs.sha256.lower() if entry.lfs else None)


def _raise_first(futures: dict[Future[None], FileRecord]) -> None:
    failures = [(file.path, future.exception()) for future, file in futures.items() if future.done()]
    for _, error in sorted((item for item in failures if item[1] is not None), key=lambda item: item[0]):
        if error is not None and not isinstance(error, _StoppedError):
            raise error


def _meter(advance: Any, stop: threading.Event) -> Any:
    """What the client takes for a tqdm class; its counters for transfer and for rebuilding are one here."""

    class Meter:
        def __init__(self, *_: Any, total: int | None = None, initial: int = 0, **__: Any) -> None:
            self.total = total
            self.n = initial

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, count: float = 1) -> None:
            if stop.is_set():
                raise _StoppedError
            self.n += int(count)
            advance(int(count))

        def update_transfer(self, count: float) -> None:
            pass

        def set_postfix_str(self, *_: Any, **__: Any) -> None:
            pass

        set_transfer_postfix_str = set_description = refresh = close = set_postfix_str

    return Meter


def _remove_leftovers(directory: Path) -> None:
    """Deletes what killed processes left: the client never goes on with it, and it may be large."""
    for leftover in (directory / ".cache/huggingface/download").rglob("*.incomplete"):
        leftover.unlink(missing_ok=True)
