"""Sending one blob in one pass, in the manner that the registry can bear, and going on where it was cut.

A registry that loses its session between two chunks, or finds other bytes in it, gets the next manner.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.errors import DuopackError, quoted
from pipeline.files import human_size
from pipeline.oci.digest import Digest
from pipeline.oci.model import Blob, OnBytes
from pipeline.oci.registry.client import Client
from pipeline.oci.registry.failures import Answer, RegistryError, is_transient, refusal
from pipeline.oci.registry.feed import Feed, StoppedError
from pipeline.oci.registry.habits import Habits, Manner
from pipeline.oci.registry.journal import Journal, OpenUpload

_LARGEST_CHUNK = 64 << 30
_HEAD = 1 << 20
# With the waits between them about a minute: long enough for a registry that is restarted.
_ATTEMPTS = 8
_LOST = frozenset({400, 404, 409, 410, 416})


class BlobUpload:
    """One blob on its way. `run` once; raises RegistryError, or DuopackError when the bytes are wrong.

    `beside` says that the hashing has a thread of its own.
    """

    def __init__(
        self,
        client: Client,
        blob: Blob,
        on_bytes: OnBytes,
        habits: Habits,
        journal: Journal,
        *,
        beside: bool = True,
    ) -> None:
        self._client = client
        self._blob = blob
        self._on_bytes = on_bytes
        self._habits = habits
        self._journal = journal
        self._feed = Feed(blob, client.stop, beside=beside)
        self._doing = f"sending a layer of {human_size(blob.size)} to {client.repository}"
        self._key = ""
        self._reported = 0
        self.taken_up = 0
        """Bytes that an earlier run had sent already."""
        self._cuts = 0
        self._location: str | None = None
        self._whole: Digest | None = None
        self._forget_session()

    def run(self, location: str | None = None) -> Digest:
        """Sends the bytes; `location` is a fresh upload session to use, if one is open already."""
        self._location = location
        failures, best = 0, 0
        try:
            self._take_up_old_session()
            while True:
                manner, self._confirmed = self._habits.manner, self._feed.offset
                try:
                    return self._send(manner)
                except RegistryError as error:
                    failures = 1 if self._confirmed > best else failures + 1
                    best = max(best, self._confirmed)
                    self._recover(error, manner, failures)
        except BaseException as error:
            self._leave(error)
            raise
        finally:
            self._feed.close()

    def _send(self, manner: Manner) -> Digest:
        if self._is_unsure and (done := self._resume()):
            return done
        if manner is Manner.WHOLE:
            if self._confirmed:
                self._abandon()
            return self._send_whole()
        if self._location is None:
            self._begin()
        while self._feed.offset < self._blob.size:
            self._send_chunk(manner)
        return self._finish()

    def _begin(self) -> None:
        self._forget_session()
        self._rewind(0)
        url, doing = self._client.url("blobs/uploads/"), f"beginning an upload to {self._client.repository}"
        answer = self._client.ask("POST", url, doing, expect=(202,), retry=False)
        self._note(answer, url)

    def _send_chunk(self, manner: Manner) -> None:
        start, left = self._feed.offset, self._blob.size - self._feed.offset
        length = left if manner is Manner.STREAM else min(max(self._habits.chunk, self._minimum), left)
        self._piece = length
        is_part = length < self._blob.size
        answer = self._transfer(
            "PATCH",
            start,
            length,
            {"Content-Range": f"{start}-{start + length - 1}"} if is_part else {},
            expect=(200, 201, 202, 204),
        )
        self._note(answer, self._location)
        received = _received(answer)
        if is_part and received is not None and received != start + length:
            raise RegistryError(
                f"it has {received} bytes of an upload after {start + length} were sent",
                where=self._client.registry,
                mend="look for a proxy that changes or cuts uploads",
                codes=("RANGE_INVALID",),
                status=416,
            )
        self._feed.mark()
        self._confirmed = self._feed.offset
        if self._key and self._feed.offset < self._blob.size and self._location:
            entry = OpenUpload(self._location, self._feed.offset, self._feed.prefix_sha256())
            self._journal.record(self._key, entry)

    def _finish(self) -> Digest:
        self._whole = self._feed.digest()
        assert self._location is not None
        answer = self._client.ask(
            "PUT",
            _with_digest(self._location, self._whole),
            f"completing a layer in {self._client.repository}",
            expect=(200, 201, 204),
            headers={"Content-Type": "application/octet-stream"},
            read_seconds=_answer_seconds(self._blob.size),
            retry=False,
        )
        return self._accepted(answer, self._whole)

    def _send_whole(self) -> Digest:
        digest = self._blob.digest or self._hash_first()
        if self._blob.digest is None and self._exists(digest):
            return digest
        if self._location is None:
            self._begin()
        assert self._location is not None
        self._location = _with_digest(self._location, digest)
        self._whole = digest
        answer = self._transfer("PUT", 0, self._blob.size, {}, expect=(200, 201, 204))
        self._location = None
        if self._feed.digest() != digest:
            raise DuopackError(
                "a layer's bytes changed between two readings",
                where=str(digest),
                mend="nothing may write to its files during a build: run the same command again",
            )
        return self._accepted(answer, digest)

    def _transfer(
        self, method: str, start: int, length: int, headers: dict[str, str], expect: tuple[int, ...]
    ) -> Answer:
        def body() -> Iterator[memoryview]:
            self._rewind(start)
            if length:
                self._feed.prime()
            return self._pieces(length)

        assert self._location is not None
        url, self._is_unsure = self._location, True
        try:
            answer = self._client.send(method, url, body, length, headers, _answer_seconds(length))
        except RegistryError:
            self._cuts += self._feed.offset > start
            raise
        if answer.status not in expect:
            self._is_unsure = answer.status == 413 or is_transient(answer.status)
            raise refusal(answer, self._doing, self._client.registry)
        if self._feed.offset != start + length:
            raise RegistryError(
                f"it answered HTTP {answer.status} before it had all bytes of a layer",
                where=self._client.registry,
                mend="look for a proxy that changes or cuts uploads",
                transient=True,
            )
        self._is_unsure = False
        return answer

    def _pieces(self, length: int) -> Iterator[memoryview]:
        for piece in self._feed.take(length):
            yield piece
            self._report(self._reported + len(piece))

    def _note(self, answer: Answer, url: str | None) -> None:
        if answer.header("Location") or self._location is None:
            self._location = self._client.locate(answer, url or "")
        asked = answer.header("OCI-Chunk-Min-Length")
        if re.fullmatch(r"[0-9]{1,12}", asked):
            self._minimum = min(int(asked), _LARGEST_CHUNK)

    def _recover(self, error: RegistryError, manner: Manner, failures: int) -> None:
        """Prepares the next try, or raises `error` when there is none that could do better."""
        if failures >= _ATTEMPTS or self._client.stop.is_set():
            raise error
        if error.status == 413 and not error.codes and manner is Manner.CHUNKS:
            if not self._habits.shrink(self._piece, self._minimum):
                raise error
            return
        if error.transient:
            self._was_cut = self._is_unsure = True
            self._client.patience.wait(failures, error)
            # A proxy that resets each second PATCH looks like a bad line: three times is no accident.
            if self._cuts >= 3 and failures >= 3:
                self._cuts = 0
                self._next_manner(manner)
            return
        # Refused at the very end: a digest that was remembered may be wrong, and only hashing can tell.
        if self._whole and error.status in _LOST and self._feed.doubt():
            self._abandon()
            return
        is_about_session = self._location is not None and error.status in _LOST
        if not is_about_session and not (error.status == 413 and manner is Manner.WHOLE):
            raise error
        # A session that was cut before may well be gone: that says nothing about the manner.
        if not (self._was_cut and error.status != 400) and not self._next_manner(manner):
            raise error
        self._abandon()

    def _next_manner(self, manner: Manner) -> bool:
        is_one_piece = self._blob.size <= max(self._habits.chunk, self._minimum)
        if not self._habits.give_up(manner, one_piece=is_one_piece):
            return False
        self._abandon()
        return True

    def _resume(self) -> Digest | None:
        """Asks how far an interrupted upload came; returns the digest when it turns out to be complete."""
        self._is_unsure = False
        if self._whole and self._exists(self._whole):
            return self._whole
        offset = self._offset_there(self._feed.furthest)
        if offset is None or self._habits.manner is Manner.WHOLE:
            self._abandon()
            return None
        self._rewind(offset)
        self._confirmed = offset
        return None

    def _offset_there(self, limit: int) -> int | None:
        """How many bytes the registry holds in this session; None when it is over, or more than `limit`."""
        url = self._location
        if url is None:
            return None
        try:
            answer = self._client.ask(
                "GET", url, "asking for the state of an upload", expect=(200, 202, 204), retry=False
            )
        except RegistryError as error:
            if error.transient:
                self._is_unsure = True
                raise
            return None
        self._note(answer, url)
        offset = _received(answer)
        return offset if offset is not None and offset <= limit else None

    def _take_up_old_session(self) -> None:
        """Goes on with what an earlier run left behind, when registry and bytes agree with the journal."""
        is_one_piece = self._blob.size <= self._habits.chunk
        if is_one_piece or not self._journal.is_kept or self._habits.manner is not Manner.CHUNKS:
            return
        for _ in self._feed.take(min(_HEAD, self._blob.size)):
            pass
        self._key = f"{self._blob.size} {self._feed.prefix_sha256()}"
        entry = self._journal.find(self._key)
        if entry is None or entry.offset >= self._blob.size:
            self._feed.seek(0)
            return
        fresh, self._location = self._location, entry.location
        if not self._client.is_place(entry.location) or not self._agrees(entry):
            self._journal.forget(self._key)
            self._location = fresh
            self._feed.seek(0)
            return
        if fresh:
            self._client.cancel(fresh)
        self._was_cut = True
        self.taken_up = self._feed.offset
        self._report(self._feed.offset)

    def _agrees(self, entry: OpenUpload) -> bool:
        """Whether the bytes and the registry are where the journal says, or further; goes there."""
        self._feed.seek(entry.offset)
        if self._feed.prefix_sha256() != entry.sha256:
            return False
        self._feed.mark()
        try:
            offset = self._offset_there(self._blob.size)
        except RegistryError:
            return True  # it cannot be asked now, and will be when it can
        if offset is None or offset < entry.offset:
            return False
        self._feed.seek(offset)
        return True

    def _hash_first(self) -> Digest:
        self._rewind(0)
        for _ in self._feed.take(self._blob.size):
            pass
        return self._feed.digest()

    def _accepted(self, answer: Answer, digest: Digest) -> Digest:
        claim = answer.header("Docker-Content-Digest")
        if claim.startswith("sha256:") and claim != digest:
            raise RegistryError(
                f"it stored a layer as {quoted(claim, 80)} that was sent as {digest}",
                where=self._client.registry,
                mend="look for a proxy that changes uploads",
            )
        self._journal.forget(self._key)
        self._location = None
        self._report(self._blob.size)
        return digest

    def _exists(self, digest: Digest) -> bool:
        return self._client.has_blob(digest, self._blob.size)

    def _rewind(self, offset: int) -> None:
        self._feed.seek(offset)
        self._report(offset)

    def _report(self, count: int) -> None:
        if count != self._reported:
            self._on_bytes(count - self._reported)
            self._reported = count

    def _abandon(self) -> None:
        if self._location:
            self._client.cancel(self._location)
        self._journal.forget(self._key)
        self._forget_session()
        self._rewind(0)

    def _forget_session(self) -> None:
        self._location = None
        self._minimum = 0
        self._piece = 0
        self._confirmed = 0
        self._is_unsure = False
        self._was_cut = False
        self._whole = None

    def _leave(self, error: BaseException) -> None:
        """Keeps a session that another run can go on with, and cancels any other."""
        may_go_on = isinstance(error, StoppedError) or not isinstance(error, DuopackError)
        if may_go_on or (isinstance(error, RegistryError) and error.transient):
            return
        self._journal.forget(self._key)
        if self._location and not self._client.stop.is_set():
            self._client.cancel(self._location)


def _answer_seconds(size: int) -> float:
    """How long an answer to `size` bytes may take: some stores copy them, at 20 MB/s to be generous."""
    return 300.0 + size / 20e6


def _received(answer: Answer) -> int | None:
    """Bytes in an upload by its Range header (`0-N`, N inclusive); None when it does not say.

    `0-0` means none here: distribution says so for an empty upload, and nobody sends one byte.
    """
    found = re.fullmatch(r"(?:bytes=)?0-([0-9]{1,18})", answer.header("Range").strip())
    if not found:
        return None
    return int(found[1]) + 1 if int(found[1]) else 0


def _with_digest(location: str, digest: Digest) -> str:
    return f"{location}{'&' if '?' in location else '?'}digest={digest}"
