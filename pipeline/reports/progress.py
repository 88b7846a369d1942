"""Progress on stderr: moving bars on a terminal, a plain line now and then elsewhere.

A bar may be told of negative steps: a failed attempt that starts again takes back what it counted.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

from pipeline.files import human_size

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Bar(Protocol):
    """One running job; `advance` takes bytes and may be called from any thread."""

    def advance(self, count: int) -> None: ...

    def finish(self) -> None:
        """The job is done; nothing more is told of it."""
        ...


class Progress(Protocol):
    """Where a stage tells what it is doing."""

    def open(self, label: str, total: int | None) -> Bar:
        """A job of `total` bytes (None: nobody knows), shown until it is finished."""
        ...

    @contextmanager
    def bar(self, label: str, total: int | None) -> Iterator[Bar]:
        """The same for the time of a block."""
        bar = self.open(label, total)
        try:
            yield bar
        finally:
            bar.finish()

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def close(self) -> None: ...


def open_progress(*, quiet: bool = False, stream: TextIO | None = None) -> Progress:
    """Bars when stderr is a terminal, else plain lines; `quiet` leaves only the warnings."""
    stream = stream or sys.stderr
    if stream.isatty() and not quiet:
        return TerminalProgress()
    return PlainProgress(stream, quiet=quiet)


class PlainBar:
    """Says where a job is at most every `interval` seconds."""

    def __init__(self, progress: PlainProgress, label: str, total: int | None) -> None:
        self._progress = progress
        self._label = label
        self._total = total
        self._done = 0
        self._started = self._told = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._told < self._progress.interval:
                return
            self._told = now
            whole = "" if self._total is None else f" of {human_size(self._total)}"
            text = f"{self._label}: {human_size(self._done)}{whole}{self._speed(now)}{self._left(now)}"
        self._progress.say(text)

    def finish(self) -> None:
        now = time.monotonic()
        seconds = now - self._started
        if self._done == 0:
            return
        self._progress.say(f"{self._label}: {human_size(self._done)} in {seconds:.1f} s{self._speed(now)}")

    def _speed(self, now: float) -> str:
        seconds = now - self._started
        return f" ({human_size(self._done / seconds)}/s)" if seconds > 0.1 else ""

    def _left(self, now: float) -> str:
        """The time to go at the speed so far."""
        if self._total is None or not 0 < self._done < self._total:
            return ""
        seconds = (self._total - self._done) * (now - self._started) / self._done
        return f", {seconds:.0f} s left" if seconds < 90 else f", {seconds / 60:.0f} min left"


class PlainProgress(Progress):
    """Lines for a log: notes, a job's end, and where a long job is."""

    def __init__(self, stream: TextIO, *, quiet: bool = False, interval: float = 15.0) -> None:
        self.interval = interval
        self._stream = stream
        self._quiet = quiet
        self._lock = threading.Lock()

    def open(self, label: str, total: int | None) -> Bar:
        return PlainBar(self, label, total)

    def say(self, text: str) -> None:
        if not self._quiet:
            self._write(text)

    def note(self, text: str) -> None:
        self.say(text)

    def warn(self, text: str) -> None:
        self._write(f"warning: {text}")

    def close(self) -> None:
        self._stream.flush()

    def _write(self, text: str) -> None:
        with self._lock:
            self._stream.write(text + "\n")
            self._stream.flush()


class RichBar:
    def __init__(self, progress: RichProgress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, count: int) -> None:
        self._progress.advance(self._task, count)

    def finish(self) -> None:
        self._progress.remove_task(self._task)


class TerminalProgress(Progress):
    """Moving bars by rich, on stderr, so that stdout stays clean for results."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._console = Console(stderr=True, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._started = False

    def open(self, label: str, total: int | None) -> Bar:
        if not self._started:
            self._started = True
            self._bars.start()
        return RichBar(self._bars, self._bars.add_task(label, total=total))

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def warn(self, text: str) -> None:
        self._console.print(f"warning: {text}", markup=False, style="yellow")

    def close(self) -> None:
        if self._started:
            self._bars.stop()
            self._started = False
