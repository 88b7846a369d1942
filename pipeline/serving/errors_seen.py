"""The first error of a log: by time, and by the way in which an error travels from worker to engine to server."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from pipeline.serving.logs import Line, Role

_EXCEPTION = re.compile(
    r"([A-Za-z_][\w.]{0,160}(?:Error|Exception|Exit|Interrupt|Warning|Unexpected\w*|Timeout\w*))(?::|$)"
)
_FRAME = re.compile(r'  File "([^"]{1,400})", line (\d{1,7}), in (\S{1,120})')
_WRAPPERS = (
    "EngineDeadError",
    "See root cause above",
    "See stack trace",
    "check the stack trace above",
    "stack trace above for the root cause",
    "WorkerProc initialization failed",
    "Engine process failed to start",
    "CancelledError",
    "KeyboardInterrupt",
    "SystemExit",
    "RuntimeError: cancelled",
)
MAX_OPEN = 64
"""Tracebacks that may be open at a time, one a process; more processes than that share their places."""


@dataclass(frozen=True)
class SeenError:
    """An error of the log: what was raised or said, and the deepest frame of it."""

    line: Line
    text: str
    frame: str = ""
    wrapper: bool = False

    @property
    def order(self) -> tuple[bool, str, Role, int]:
        """Sorts what was first before what followed from it; the log's clock counts whole seconds."""
        return self.wrapper, self.line.when, self.line.role, self.line.number


@dataclass
class _Open:
    """A traceback that has begun; `level` is that of the record it stands in."""

    level: str
    when: str
    frame: str = ""


@dataclass
class ErrorReader:
    """Takes lines as they come, and keeps the first exception and the first other error."""

    raised: SeenError | None = None
    said: SeenError | None = None
    _refused: set[str] = field(default_factory=set)
    """Processes whose next traceback is about one request: the server answers it with an error and goes on."""
    _open: dict[str, _Open] = field(default_factory=dict)

    def add(self, line: Line) -> SeenError | None:
        """The exception that ends on this line, if one does."""
        if line.text.startswith("Traceback (most recent call last)"):
            if len(self._open) >= MAX_OPEN:
                self._open.clear()
            refused = line.process in self._refused
            self._refused.discard(line.process)
            self._open[line.process] = _Open("INFO" if refused else line.level, line.when)
            return None
        self._complete(line)
        traceback = self._open.get(line.process)
        if traceback is None and line.text.startswith("Exception in ASGI application"):
            if len(self._refused) < MAX_OPEN:
                self._refused.add(line.process)
            return None
        if traceback is None:
            if line.level in {"ERROR", "CRITICAL"} or _said(line.text):
                self._keep_said(SeenError(line, line.text, wrapper=_is_wrapper(line.text)))
            return None
        if frame := _FRAME.match(line.text):
            traceback.frame = f"{frame[1]}:{frame[2]} in {frame[3]}"
            return None
        if not line.text or line.text[0] in " \t^~|+":
            return None
        del self._open[line.process]
        return self._raised(line, traceback)

    def _complete(self, line: Line) -> None:
        """Adds the line below an exception that only counts its errors, as pydantic's does: it has the words."""
        raised = self.raised
        if raised is None or "validation error" not in raised.text or not line.text.startswith("  "):
            return
        if line.process == raised.line.process and line.number == raised.line.number + 1:
            self.raised = replace(raised, text=f"{raised.text}:{line.text[1:]}")

    def first(self) -> SeenError | None:
        """What was first: an exception, else what a logger called an error, else what followed from one unseen."""
        found = [error for error in (self.raised, self.said) if error]
        return min(found, key=lambda error: (error.wrapper, error is self.said)) if found else None

    def _raised(self, line: Line, traceback: _Open) -> SeenError | None:
        # A traceback in a record of a lower level was dealt with.
        if traceback.level in {"DEBUG", "INFO", "WARNING"} or not _EXCEPTION.match(line.text):
            return None
        dated = Line(line.number, line.text, line.process, line.level, line.when or traceback.when)
        error = SeenError(dated, line.text, traceback.frame, _is_wrapper(line.text))
        if self.raised is None or _before(error, self.raised):
            self.raised = error
        return error

    def _keep_said(self, error: SeenError) -> None:
        if self.said is None or (self.said.wrapper and not error.wrapper):
            self.said = error


def _before(one: SeenError, other: SeenError) -> bool:
    """Lines without a time are as late as where they stand."""
    if one.wrapper != other.wrapper:
        return other.wrapper
    if one.line.when and other.line.when:
        return one.order < other.order
    return one.line.number < other.line.number


def _is_wrapper(text: str) -> bool:
    return any(word in text for word in _WRAPPERS)


def _said(text: str) -> bool:
    """Errors that no logger wrote: of argparse, the shell, the interpreter, the chip's libraries, the engine."""
    return text.startswith(
        ("vllm: error:", "vllm serve: error:", "docker: Error", "Fatal Python error", "[ERROR] ")
    ) or text in {"Killed", "Segmentation fault", "Segmentation fault (core dumped)"}
