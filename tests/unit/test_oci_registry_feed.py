"""A blob's bytes on their way out, hashed beside the sending or on the spot, or known by their digest."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from pipeline.errors import DuopackError
from pipeline.oci.digest import Digest
from pipeline.oci.model import OCI_LAYER_TAR
from pipeline.oci.registry.feed import Feed, StoppedError

DATA = random.Random(3).randbytes(3_000_000)
DIGEST = Digest.of(DATA)


@dataclass(frozen=True)
class Pieces:
    """Bytes in pieces that are large enough for a thread of their own; `given` is what is there in truth."""

    given: bytes = DATA
    size: int = len(DATA)
    digest: Digest | None = None
    opened: list[int] = field(default_factory=list)
    media_type: str = OCI_LAYER_TAR

    def read(self, offset: int = 0) -> Iterator[bytes]:
        self.opened.append(offset)
        for start in range(offset, len(self.given), 400_000):
            yield self.given[start : start + 400_000]


def threads() -> set[threading.Thread]:
    """Those that run now; another test's may end at any time, so they are compared and not counted."""
    return set(threading.enumerate())


def take_all(feed: Feed) -> Digest:
    for _ in feed.take(len(DATA)):
        pass
    return feed.digest()


@pytest.fixture(params=[True, False], ids=["beside", "on the spot"])
def beside(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_bytes_and_digest_are_the_blobs(beside: bool) -> None:
    feed = Feed(Pieces(), threading.Event(), beside=beside)
    assert b"".join(feed.take(len(DATA))) == DATA
    assert feed.digest() == DIGEST
    feed.close()


def test_going_back_and_forth_does_not_change_the_hash(beside: bool) -> None:
    feed = Feed(Pieces(), threading.Event(), beside=beside)
    assert b"".join(feed.take(1_000_000)) == DATA[:1_000_000]
    feed.mark()
    assert b"".join(feed.take(1_500_000)) == DATA[1_000_000:2_500_000]
    for offset in (1_200_000, 7, 2_999_999, 1_000_000):
        feed.seek(offset)
        assert feed.prefix_sha256() == hashlib.sha256(DATA[:offset]).hexdigest()
    assert b"".join(feed.take(2_000_000)) == DATA[1_000_000:]
    assert feed.digest() == DIGEST
    feed.close()


@pytest.mark.parametrize("given", [DATA[:-1], DATA + b"x"], ids=["short", "long"])
@pytest.mark.parametrize("digest", [None, DIGEST], ids=["unknown", "known"])
def test_another_length_than_promised_is_found(given: bytes, digest: Digest | None, beside: bool) -> None:
    feed = Feed(Pieces(given, digest=digest), threading.Event(), beside=beside)
    with pytest.raises(DuopackError, match="not what it was said to be"):
        take_all(feed)
    feed.close()


def test_of_a_known_digest_nothing_is_hashed_and_nothing_read_twice() -> None:
    before = threads()
    blob = Pieces(digest=DIGEST)
    feed = Feed(blob, threading.Event())
    assert b"".join(feed.take(1_000_000)) == DATA[:1_000_000]
    assert threads() <= before
    feed.mark()
    feed.seek(2_000_000)
    assert b"".join(feed.take(1_000_000)) == DATA[2_000_000:]
    assert feed.digest() == DIGEST
    assert blob.opened == [0, 2_000_000]
    assert feed.furthest == len(DATA)


def test_places_in_a_blob_have_names_that_no_other_blob_shares() -> None:
    def name(digest: Digest | None, offset: int) -> str:
        feed = Feed(Pieces(digest=digest), threading.Event())
        feed.seek(offset)
        found = feed.prefix_sha256()
        feed.close()
        return found

    assert name(DIGEST, 500_000) == name(DIGEST, 500_000)
    others = {
        name(DIGEST, 500_000),
        name(DIGEST, 500_001),
        name(Digest.of(b""), 500_000),
        name(None, 500_000),
    }
    assert len(others) == 4


def test_a_digest_that_is_doubted_is_compared_with_the_bytes() -> None:
    right, wrong = (Feed(Pieces(digest=one), threading.Event()) for one in (DIGEST, Digest.of(b"other")))
    for feed in (right, wrong):
        list(feed.take(1_000_000))
        assert feed.doubt()
        assert not feed.doubt()
        assert feed.offset == 0
    assert take_all(right) == DIGEST
    with pytest.raises(DuopackError, match=f"the bytes have the digest {DIGEST}"):
        take_all(wrong)
    right.close()
    wrong.close()


def test_no_thread_is_left_and_none_is_made_on_the_spot(beside: bool) -> None:
    before = threads()
    feed = Feed(Pieces(), threading.Event(), beside=beside)
    pieces = feed.take(len(DATA))
    next(pieces)
    assert len(threads() - before) == int(beside)
    feed.close()
    assert threads() <= before


def test_a_stop_ends_it_before_the_next_reading(beside: bool) -> None:
    stop = threading.Event()
    feed = Feed(Pieces(), stop, beside=beside)
    pieces = feed.take(len(DATA))
    next(pieces)
    stop.set()
    with pytest.raises(StoppedError):
        list(pieces)
    feed.close()
