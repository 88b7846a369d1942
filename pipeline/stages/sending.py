"""What a transfer looks like to people, and how much it moved."""

from __future__ import annotations

import threading

from pipeline.files import human_size
from pipeline.oci.model import OnBytes
from pipeline.reports.progress import Progress


class Sending:
    """Shows the layers as they move, and counts what moved; called from several threads."""

    def __init__(self, progress: Progress) -> None:
        self.layers = 0
        self.bytes = 0
        self._progress = progress
        self._mutex = threading.Lock()

    def start(self, title: str, size: int) -> OnBytes:
        with self._mutex:
            self.layers += 1
        bar = self._progress.open(f"send {title}", size)
        left = size

        def moved(count: int) -> None:
            nonlocal left
            bar.advance(count)
            with self._mutex:
                self.bytes += count
                left -= count
                if left == 0:
                    bar.finish()

        return moved

    def skipped(self, title: str, size: int) -> None:
        self._progress.note(f"there already: {title} ({human_size(size)})")
