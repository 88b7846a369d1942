"""Measuring commands: seconds, memory, bytes on the disk and on the wire."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self


class BenchError(Exception):
    """A contender that could not do its work."""


@dataclass(frozen=True)
class Sample:
    """One measurement: wall-clock seconds, and, where they mean something, sizes in bytes.

    `memory` is the largest resident set of a process, `left` what stays on the builder's disk besides the
    registry's copy, `sent` what went to the registry in TCP streams.
    """

    seconds: float
    memory: int | None = None
    left: int | None = None
    sent: int | None = None
    steps: Mapping[str, float] = field(default_factory=dict)


def run(command: Sequence[str], *, env: Mapping[str, str], cwd: Path | None = None) -> Sample:
    """Runs a command to its end. Raises BenchError with the end of its output when it fails.

    The memory is what the kernel says of the process; it counts the moment of the fork too, so a small
    command is never smaller than the process that measures.
    """
    with tempfile.TemporaryFile() as log:
        started = time.monotonic()
        process = subprocess.Popen(command, env=env, cwd=cwd, stdout=log, stderr=log)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        seconds = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            output = log.read().decode(errors="replace")[-2000:]
            raise BenchError(f"{' '.join(command[:3])} … ended with {process.returncode}:\n{output}")
    return Sample(seconds, memory=usage.ru_maxrss << 10)


def peak_memory(pid: int) -> int:
    """The largest resident set that a running process had, in bytes."""
    fields = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return next(int(words[1]) << 10 for words in fields if words[0] == "VmHWM:")


def disk_usage(directory: Path) -> int:
    """Bytes that the files below a directory take on the disk; a file with several names counts once."""
    found: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            status = (Path(folder) / name).lstat()
            found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


class CountingProxy:
    """A TCP proxy on loopback in front of `target` ("host:port"); `sent` counts bytes on their way to it."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._mutex = threading.Lock()
        self.sent = 0
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                threading.Thread(target=self._pump, args=(near, far, True), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if counted:
                    with self._mutex:
                        self.sent += len(data)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
