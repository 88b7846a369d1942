"""How much an image may cost its reader: named bounds, and the account of what has been spent.

An image can claim anything. Whoever looks into one spends from a `Budget`; what would go beyond is a LimitError,
so that memory and time stay what the limits say, whatever comes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.errors import DuopackError
from pipeline.files import human_size


@dataclass(frozen=True)
class Limits:
    """Bounds for one image. Sizes are in bytes."""

    members: int = 5_000_000
    """Entries of all layers that are looked at; the largest known base has about 300,000."""
    kept: int = 500_000
    """Entries that are remembered by name; about 300 bytes of memory each."""
    names: int = 96 << 20
    """The names of those entries, all together."""
    documents: int = 192 << 20
    """JSON, scripts and safetensors headers held in memory at the same time."""
    document: int = 32 << 20
    """One such document. The quantized headers of a model with 100,000 tensors have 15 MB."""
    values: int = 3_000_000
    """JSON values in one document: each costs up to 100 bytes once it is parsed."""
    unpacked: int = 4 << 40
    """What compressed layers may become, all together."""
    ratio: int = 200
    """Times that a layer may grow when unpacked, beyond its first GiB; gzip itself ends at 1032."""
    whole: int = 64 << 20
    """Compressed layers up to this size are unpacked without being asked to …"""
    peek: int = 16 << 20
    """… and of larger ones so much."""
    peeks: int = 512 << 20
    """All of that together, as compressed."""
    seconds: float = 900.0
    """The whole look."""


DEFAULT = Limits()
DEEP_SECONDS = 24 * 3600.0
"""Reading every byte of the largest image takes hours over a slow line, and no more than a day."""
RATIO_FREE = 1 << 30
"""Bytes that a layer may have unpacked before its ratio counts: a small one may well be mostly zeros."""


class LimitError(DuopackError):
    """Looking further would cost more than the limits allow; `limit` is the field of `Limits`."""

    def __init__(self, limit: str, what: str, *, where: str = "") -> None:
        option = f"--limit {limit}=…"
        super().__init__(what, where=where, mend=f"do not trust this image, or raise the limit: {option}")
        self.limit = limit


class Budget:
    """What looking into one image has cost so far. Used by several threads."""

    def __init__(self, limits: Limits = DEFAULT, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._end = clock() + limits.seconds
        self._spent: dict[str, int] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self._members = 0

    def stop(self) -> None:
        """Makes every later spending fail: another thread has failed, or Ctrl-C."""
        self._stopped = True

    def check_time(self) -> None:
        """Raises LimitError when the time is over."""
        if self._stopped:
            raise LimitError("seconds", "the look into the image was given up")
        if self._clock() > self._end:
            raise LimitError("seconds", f"looking into the image took more than {self.limits.seconds:.0f} s")

    def member(self) -> None:
        """One more entry of a layer; threads may lose one to each other, which a bound of millions does not mind."""
        self._members += 1
        if self._members > self.limits.members:
            raise LimitError("members", f"the layers have more than {self.limits.members} entries")

    def keep(self, name: str) -> bool:
        """Whether one more entry can be remembered by name."""
        with self._lock:
            kept, names = self._spent.get("kept", 0) + 1, self._spent.get("names", 0) + len(name)
            if kept > self.limits.kept or names > self.limits.names:
                return False
            self._spent |= {"kept": kept, "names": names}
            return True

    def hold(self, size: int) -> None:
        """A document of so many bytes is held in memory."""
        self._spend(
            "documents",
            size,
            lambda most: f"headers and JSON files have more than {human_size(most)} together",
        )

    def release(self, size: int) -> None:
        """It is not held any more."""
        with self._lock:
            self._spent["documents"] = self._spent.get("documents", 0) - size

    def peek(self, size: int) -> bool:
        """Whether so many bytes of a compressed layer may be unpacked unasked."""
        with self._lock:
            spent = self._spent.get("peeks", 0) + size
            if spent > self.limits.peeks:
                return False
            self._spent["peeks"] = spent
            return True

    def unpack(self, size: int) -> None:
        """So many bytes more came out of compressed layers."""
        self._spend("unpacked", size, lambda most: f"the layers unpack to more than {human_size(most)}")

    def _spend(self, name: str, count: int, sentence: Callable[[int], str]) -> None:
        most: int = getattr(self.limits, name)
        with self._lock:
            spent = self._spent[name] = self._spent.get(name, 0) + count
        if spent > most:
            raise LimitError(name, sentence(most))
