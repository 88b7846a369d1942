"""How a registry wants its blobs: three manners of upload (distribution-spec 1.1, "Pushing Blobs").

Chunks of one session can be taken up after a cut; some proxies break them. One streaming PATCH needs no
digest in advance. POST and PUT is what some public registries insist on.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from enum import Enum

CHUNK = 256 << 20
_SMALLEST_CHUNK = 4 << 20
_WANT_WHOLE = re.compile(
    r"(ghcr\.io|(.+\.)?gcr\.io|.+\.pkg\.dev|.+\.amazonaws\.com|.+\.amazonaws\.com\.cn)(:[0-9]+)?"
)


class Manner(Enum):
    """How a blob's bytes travel."""

    CHUNKS = "chunks of one upload"
    STREAM = "one streaming PATCH"
    WHOLE = "one PUT"


@dataclass
class Habits:
    """What a registry has taught us so far, shared by all uploads to it; `chunk` is in bytes."""

    manners: list[Manner]
    chunk: int = CHUNK
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, registry: str, chunk: int = CHUNK) -> Habits:
        """Where to begin with a registry: some public ones are known to want one PUT."""
        if _WANT_WHOLE.fullmatch(registry):
            return cls([Manner.WHOLE, Manner.STREAM], chunk)
        return cls([Manner.CHUNKS, Manner.STREAM, Manner.WHOLE], chunk)

    @property
    def manner(self) -> Manner:
        return self.manners[0]

    def give_up(self, manner: Manner, *, one_piece: bool) -> bool:
        """Goes on to the next manner, unless another upload has done so; says whether there is one.

        For a blob that fits one chunk, chunks and a stream are the same thing.
        """
        with self.lock:
            while len(self.manners) > 1 and self.manner is manner:
                self.manners.pop(0)
                if one_piece and manner is Manner.CHUNKS and self.manner is Manner.STREAM:
                    manner = Manner.STREAM
            return self.manner is not manner

    def shrink(self, chunk: int, minimum: int) -> bool:
        """Takes smaller chunks after one of `chunk` bytes was refused; says whether that is possible."""
        with self.lock:
            if self.chunk >= chunk:
                self.chunk = max(chunk // 4, _SMALLEST_CHUNK, minimum)
            return self.chunk < chunk
