"""A blob's bytes on their way out, hashed beside the sending or on the spot."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from pipeline.errors import DuopackError
from pipeline.oci.digest import Digest
from pipeline.oci.model import OCI_LAYER_TAR
from pipeline.oci.registry.feed import Feed, StoppedError

DATA = random.Random(3).randbytes(3_000_000)
DIGEST = Digest.of(DATA)


@dataclass(frozen=True)
class Pieces:
    """Bytes in pieces that are large enough for a thread of their own; `given` instead of what was promised."""

    given: bytes = DATA
    size: int = len(DATA)
    digest: Digest | None = DIGEST
    media_type: str = OCI_LAYER_TAR

    def read(self, offset: int = 0) -> Iterator[bytes]:
        for start in range(offset, len(self.given), 400_000):
            yield self.given[start : start + 400_000]


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


@pytest.mark.parametrize("given", [DATA[:-1], DATA + b"x", DATA[:-1] + b"x"], ids=["short", "long", "other"])
def test_other_bytes_than_promised_are_found(given: bytes, beside: bool) -> None:
    feed = Feed(Pieces(given), threading.Event(), beside=beside)
    with pytest.raises(DuopackError, match="not what it was said to be"):
        take_all(feed)
    feed.close()


def test_no_thread_is_left_and_none_is_made_on_the_spot(beside: bool) -> None:
    before = threading.active_count()
    feed = Feed(Pieces(), threading.Event(), beside=beside)
    pieces = feed.take(len(DATA))
    next(pieces)
    assert threading.active_count() - before == int(beside)
    feed.close()
    assert threading.active_count() == before


def test_a_stop_ends_it_before_the_next_reading(beside: bool) -> None:
    stop = threading.Event()
    feed = Feed(Pieces(), stop, beside=beside)
    pieces = feed.take(len(DATA))
    next(pieces)
    stop.set()
    with pytest.raises(StoppedError):
        list(pieces)
    feed.close()
