"""A real dockerd of its own in a directory, without a network, on a unix socket."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import docker
from docker.errors import DockerException

_NUMBERS = itertools.count()


@contextmanager
def running_engine(directory: Path, storage: str = "overlay2", *, network: bool = False) -> Iterator[str]:
    """Starts dockerd (root), yields its address for DOCKER_HOST, and stops it.

    With `network` its containers have a bridge of their own and can publish ports. It knows a runtime
    `ascend`, which is plain runc.
    """
    address = f"unix://{directory / 'docker.sock'}"
    command = [
        "dockerd",
        "--host",
        address,
        "--data-root",
        directory / "data",
        "--exec-root",
        directory / "exec",
    ]
    command += [
        "--pidfile",
        directory / "pid",
        "--iptables=false",
        "--add-runtime",
        f"ascend={shutil.which('runc')}",
        "--storage-driver",
        storage,
    ]
    log_path = directory / "dockerd.log"
    with _bridge() if network else nullcontext("none") as bridge, log_path.open("wb") as log:
        process = subprocess.Popen([*command, "--bridge", bridge], stdout=log, stderr=log)
        try:
            _wait(address, process, log_path)
            yield address
        finally:
            process.terminate()
            process.wait(60)
            unmount_below(directory)
            shutil.rmtree(directory / "data", ignore_errors=True)


@contextmanager
def _bridge() -> Iterator[str]:
    """A bridge that lives as long as the engine; docker-proxy carries what is published on loopback.

    Other test runs have theirs: its name and its subnet are nobody else's.
    """
    name = f"duo{os.getpid()}-{next(_NUMBERS)}"
    subprocess.run(["ip", "link", "add", name, "type", "bridge"], check=True)
    try:
        taken = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout
        free = [octet for octet in range(1, 255) if f" 172.31.{octet}." not in taken]
        subprocess.run(["ip", "addr", "add", f"172.31.{random.choice(free)}.1/24", "dev", name], check=True)
        subprocess.run(["ip", "link", "set", name, "up"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "link", "del", name], check=False)


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        with suppress(DockerException):
            client = docker.DockerClient(base_url=address, timeout=5)
            client.ping()
            client.close()
            return
        time.sleep(0.2)
    raise RuntimeError(f"dockerd did not start:\n{log.read_text()[-3000:]}")


def unmount_below(directory: Path) -> None:
    """Lets go of what an engine or a builder left mounted."""
    for mount in reversed(_mounts_below(directory)):
        subprocess.run(["umount", mount], check=False)


def _mounts_below(directory: Path) -> list[str]:
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [point for point in points if point.startswith(f"{directory}/")]
