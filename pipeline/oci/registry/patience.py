"""Waiting and trying again: exponential back-off with jitter, and what a server asks for in Retry-After."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeVar

from pipeline.errors import DuopackError

T = TypeVar("T")


class PostponedError(DuopackError):
    """A failure; when `transient` the same request may succeed, though not before `retry_after` seconds."""

    transient = False
    retry_after: float | None = None


@dataclass(frozen=True)
class Patience:
    """How often and how long to wait: exponential back-off with jitter. Times are in seconds."""

    attempts: int = 5
    first: float = 0.5
    cap: float = 30.0
    longest: float = 180.0
    sleep: Callable[[float], object] = time.sleep

    def run(self, action: Callable[[], T]) -> T:
        """Repeats `action` while it raises a transient PostponedError, then lets the last one through."""
        for attempt in range(1, self.attempts):
            try:
                return action()
            except PostponedError as error:
                if not error.transient:
                    raise
                self.wait(attempt, error)
        return action()

    def wait(self, attempt: int, error: PostponedError) -> None:
        """Waits after failure number `attempt`; raises `error` when the registry asks for too long a wait."""
        if error.retry_after is not None and error.retry_after > self.longest:
            raise error
        delay = min(self.cap, self.first * 2.0 ** min(attempt - 1, 16))
        jittered = delay * random.uniform(0.5, 1.0)
        self.sleep(jittered if error.retry_after is None else max(error.retry_after, jittered / 2))


def retry_after(value: str) -> float | None:
    """Seconds of a Retry-After header: a number, or a date."""
    if re.fullmatch(r"[0-9]{1,9}", value.strip()):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
