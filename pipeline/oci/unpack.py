"""A layer's bytes as a stream, decompressed within bounds."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from pipeline.errors import DuopackError
from pipeline.files import human_size
from pipeline.oci.limits import RATIO_FREE, Budget, LimitError
from pipeline.oci.tarindex import TarError

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_PIECE = 1 << 20
_PART = 16 << 10
_MAX_WINDOW = 128 << 20


class NoDecompressorError(DuopackError):
    """This Python cannot decompress it."""


def compression(magic: bytes) -> str:
    """How a layer with these first bytes is compressed: gzip, zstd, or '' for not at all."""
    if magic.startswith(GZIP_MAGIC):
        return "gzip"
    return "zstd" if magic.startswith(ZSTD_MAGIC) else ""


def unpacked(
    pieces: Iterable[bytes | memoryview], method: str, budget: Budget
) -> Iterator[bytes | memoryview]:
    """The decompressed bytes, at most 1 MiB at a time.

    Raises TarError when the stream is broken, LimitError when it grows too far, NoDecompressorError.
    """
    if not method:
        yield from pieces
        return
    came = grown = 0

    def counted(source: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        nonlocal came
        for piece in source:
            budget.check_time()
            came += len(piece)
            yield piece

    make = _gunzipped if method == "gzip" else _unzstd
    for piece in make(counted(pieces)):
        grown += len(piece)
        budget.unpack(len(piece))
        if grown > max(RATIO_FREE, came * budget.limits.ratio):
            ratio = grown // max(came, 1)
            what = f"{human_size(came)} of it unpacked to {human_size(grown)}, {ratio} times as much"
            raise LimitError("ratio", what)
        yield piece


def _gunzipped(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Any number of gzip members after each other, as pigz and stargz write them."""
    decoder = zlib.decompressobj(31)
    try:
        for piece in pieces:
            # Short parts: each end of a member copies what follows it.
            for start in range(0, len(piece), _PART):
                rest, full = bytes(piece[start : start + _PART]), False
                while rest or full:
                    if decoder.eof:
                        # Zeros may fill up the last block of a tape.
                        if not (rest := rest.lstrip(b"\0")):
                            break
                        decoder = zlib.decompressobj(31)
                    if out := decoder.decompress(rest, _PIECE):
                        yield out
                    full = len(out) == _PIECE and not decoder.eof
                    rest = decoder.unconsumed_tail or decoder.unused_data
    except zlib.error as error:
        raise TarError(f"its gzip stream is broken: {error}") from error
    if not decoder.eof:
        raise TarError("its gzip stream ends early")


def _unzstd(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    zstd = _zstandard()
    decoder = zstd.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    reader = decoder.stream_reader(PieceReader(pieces), read_across_frames=True)
    try:
        while piece := reader.read(_PIECE):
            yield piece
    except zstd.ZstdError as error:
        raise TarError(f"its zstd stream is broken: {error}") from error


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise NoDecompressorError(
            "it is compressed with zstd, which needs a Python package that is not installed",
            mend="pip install zstandard",
        ) from None
    return zstandard


class PieceReader:
    """Pieces as something to read from, forward only; a `tarindex.Reader`."""

    def __init__(self, pieces: Iterable[bytes | memoryview]) -> None:
        self.position = 0
        self.size: int | None = None
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, fewer only at the end."""
        parts = []
        while size and (part := self.part(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def part(self, size: int) -> memoryview:
        """At least one byte and up to `size`, without a copy; none at the end."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return self._rest
            self._rest = memoryview(piece)
        part, self._rest = self._rest[:size], self._rest[size:]
        self.position += len(part)
        return part

    def advance(self, position: int) -> bool:
        """Goes forward to `position`; False when the bytes end before."""
        while self.position < position:
            if not self.part(position - self.position):
                return False
        return True
