"""Debian's docker-registry on loopback, for tests that need a real one."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

import pytest

PROGRAM = "docker-registry"


class RegistryServer:
    """A registry that keeps its files in `root`; it can be killed and started again on the same port.

    `login` is (user, password, bcrypt hash): then every request needs it.
    """

    def __init__(self, root: Path, *, login: tuple[str, str, str] | None = None) -> None:
        self.root = root
        self.login = login
        self.host = f"127.0.0.1:{_free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def log(self) -> Path:
        return self.root / "registry.log"

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        if not shutil.which(PROGRAM):
            pytest.skip(f"{PROGRAM} is not installed")
        config = self.root / "config.yml"
        self.root.mkdir(parents=True, exist_ok=True)
        config.write_text(json.dumps(self._config()))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([PROGRAM, "serve", str(config)], stdout=log, stderr=log)
        deadline = time.monotonic() + 15
        while not self._answers():
            if time.monotonic() > deadline or self._process.poll() is not None:
                self.stop()
                pytest.fail(f"{PROGRAM} did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends the server."""
        if self._process:
            self._process.terminate()
            self._process.wait(10)
            self._process = None

    def kill(self) -> None:
        """Ends the server as a crash would (SIGKILL)."""
        assert self._process
        self._process.kill()
        self._process.wait(10)
        self._process = None

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://{self.host}/v2/", timeout=2).close()
        except urllib.error.HTTPError as error:
            return error.code == 401
        except OSError:
            return False
        return True

    def _config(self) -> dict[str, object]:
        config: dict[str, object] = {
            "version": "0.1",
            "log": {"level": "info"},
            "storage": {
                "filesystem": {"rootdirectory": str(self.root / "data")},
                "delete": {"enabled": True},
                "maintenance": {"uploadpurging": {"enabled": False}},
            },
            # With a fixed secret an upload session survives a restart.
            "http": {"addr": self.host, "secret": "a fixed secret for tests"},
        }
        if self.login:
            user, _, hashed = self.login
            users = self.root / "htpasswd"
            users.write_text(f"{user}:{hashed}\n")
            config["auth"] = {"htpasswd": {"realm": "tests", "path": str(users)}}
        return config


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
