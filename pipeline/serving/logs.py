"""A server's log, line by line: decoration taken off, each line bounded, the stream never held.

The forms are those of vLLM 0.20.2 (`(EngineCore pid=7) ERROR 06-14 20:12:01 [core.py:1099] text`), older and newer
ones with other process names, uvicorn's, and what docker, docker compose and its json-file driver put around them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

MAX_LINE = 16384
"""Characters of a line that are looked at; a longer one is cut."""
MAX_JSON = 256 << 10
"""Bytes of a line of docker's json-file driver, which must be whole to be read."""

_ANSI = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)?|[@-Z\\^_])")
_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d) (?:std(?:out|err) [FP] )?"
)
_COMPOSE = re.compile(r"[A-Za-z0-9][\w.-]{0,80} +\| ")
_PROCESS = re.compile(r"\(([A-Za-z][\w ]{0,40}?)(?: (?:rank|pid)=\d{1,10}){1,2}\) ?")
_RANK = re.compile(r"\[rank(\d{1,4})\]: ?")
_RECORD = re.compile(
    r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d-\d\d \d\d:\d\d:\d\d) "
    r"(?:\[[^\]\s]{1,120}:\d{1,6}\]|\S{1,120}:\d{1,6}\]) ?"
)
_UVICORN = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL): +")


class Role(IntEnum):
    """Who wrote a line, in the order in which a failure travels upwards."""

    WORKER = 0
    ENGINE = 1
    SERVER = 2
    OTHER = 3


@dataclass(frozen=True)
class Line:
    """One line.

    `when` is `MM-DD HH:MM:SS` or "", docker's where it has put one; `level` is "" where no logger wrote it.
    """

    number: int
    text: str
    process: str = ""
    level: str = ""
    when: str = ""

    @property
    def role(self) -> Role:
        name = self.process.lower()
        if "worker" in name or name.startswith("rank"):
            return Role.WORKER
        if "engine" in name:
            return Role.ENGINE
        return Role.SERVER if "server" in name else Role.OTHER


def lines_of(chunks: Iterable[bytes]) -> Iterator[Line]:
    """The lines of a stream of bytes in pieces of any size, with at most one line in memory.

    A carriage return starts the text anew: progress bars are written over each other with it.
    """
    for number, raw in enumerate(_split(chunks), 1):
        for part in raw.split(b"\r"):
            if part.strip():
                yield parse_line(part, number)


def parse_line(raw: bytes, number: int) -> Line:
    """A line of a log without its decoration, whatever is left of it."""
    text, when = _unwrap(raw)
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if match := _STAMP.match(text):
        text, when = text[match.end() :], f"{match[1][5:]} {match[2]}"
    if " | " in text[:120] and (match := _COMPOSE.match(text)):
        text = text[match.end() :]
    process, level = "", ""
    while match := _PROCESS.match(text) or _RANK.match(text):
        process = process or (match[1] if match.re is _PROCESS else f"rank{match[1]}")
        text = text[match.end() :]
    if match := _RECORD.match(text):
        # One clock for all lines: docker's counts in UTC, a container's own may not.
        level, when, text = match[1], when or match[2], text[match.end() :]
    elif match := _UVICORN.match(text):
        level, text = match[1], text[match.end() :]
    return Line(number, text.rstrip(), process, level, when)


def _unwrap(raw: bytes) -> tuple[str, str]:
    """The text and time of a line, out of docker's json-file form where it is in it."""
    if raw.startswith(b'{"log":'):
        try:
            record = json.loads(raw)
            stamp = str(record.get("time", ""))
            when = f"{stamp[5:10]} {stamp[11:19]}" if len(stamp) >= 19 else ""
            return str(record["log"])[:MAX_LINE].rstrip("\r\n"), when
        except (ValueError, KeyError, AttributeError, RecursionError):
            pass
    return raw[: 4 * MAX_LINE].decode("utf-8", "replace")[:MAX_LINE], ""


def _split(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their ends; of one that is longer than MAX_JSON only the beginning."""
    kept = b""
    for chunk in chunks:
        pieces = chunk.split(b"\n")
        pieces[0] = kept + pieces[0][: MAX_JSON - len(kept)]
        yield from pieces[:-1]
        kept = pieces[-1][:MAX_JSON]
    if kept:
        yield kept
