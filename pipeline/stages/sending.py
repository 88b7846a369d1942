"""What a transfer looks like to people, and how much it moved."""

from __future__ import annotations

import threading
from typing import Protocol, runtime_checkable

from pipeline.files import human_size
from pipeline.oci.model import OnBytes, Sink
from pipeline.reports.progress import Bar, Progress


@runtime_checkable
class Sparing(Protocol):
    """A sink that may take a layer without its bytes being sent."""

    spared_bytes: int
    spared_blobs: int


class Sending:
    """Shows the layers as they move, and counts what moved; called from several threads."""

    def __init__(self, progress: Progress, sink: Sink) -> None:
        self._progress = progress
        self._sink = sink
        self._layers = 0
        self._bytes = 0
        self._mutex = threading.Lock()

    @property
    def layers(self) -> int:
        """Layers that were sent, whole or the rest of one."""
        return self._layers - (self._sink.spared_blobs if isinstance(self._sink, Sparing) else 0)

    @property
    def bytes(self) -> int:
        """Bytes of layers that went over the wire or onto the disk; what was mounted did not."""
        return self._bytes - (self._sink.spared_bytes if isinstance(self._sink, Sparing) else 0)

    def start(self, title: str, size: int) -> OnBytes:
        with self._mutex:
            self._layers += 1
        return _Layer(self, f"send {title}", size).moved

    def skipped(self, title: str, size: int) -> None:
        self._progress.note(f"there already: {title} ({human_size(size)})")

    def open(self, label: str, size: int) -> Bar:
        return self._progress.open(label, size)

    def count(self, moved: int) -> None:
        with self._mutex:
            self._bytes += moved


class _Layer:
    """One layer's bar: gone when all has moved, back when the last answer makes it start again."""

    def __init__(self, sending: Sending, label: str, size: int) -> None:
        self._sending = sending
        self._label = label
        self._size = size
        self._done = 0
        self._bar: Bar | None = sending.open(label, size)

    def moved(self, count: int) -> None:
        if self._bar is None:
            self._bar = self._sending.open(self._label, self._size)
            self._bar.advance(self._done)
        self._bar.advance(count)
        self._sending.count(count)
        self._done += count
        if self._done == self._size:
            self._bar.finish()
            self._bar = None
