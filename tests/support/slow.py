"""A narrow line to a server: counts what goes up it, and lets so many bytes pass a second."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Self


class SlowLine:
    """Listens on loopback at `host` and passes each connection on to `target` (host:port).

    `rate` is in bytes a second for all connections together; 0 lets everything through.
    """

    def __init__(self, target: str, rate: int = 0) -> None:
        self.rate = rate
        self.sent = 0
        address, _, port = target.rpartition(":")
        self._target = (address, int(port))
        self._mutex = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # A thread in accept() keeps the port until it is woken.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def wait(self, sent: int, seconds: float = 60) -> None:
        """Until so many bytes have gone up."""
        end = time.monotonic() + seconds
        while self.sent < sent:
            assert time.monotonic() < end, f"only {self.sent} bytes came"
            time.sleep(0.01)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                threading.Thread(target=self._pass, args=(near, far, True), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, False), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                if up:
                    self._slow_down(len(piece))
                sink.sendall(piece)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _slow_down(self, count: int) -> None:
        with self._mutex:
            self.sent += count
            if self.rate:
                time.sleep(count / self.rate)
