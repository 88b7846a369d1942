"""A real dockerd of its own in a directory, without a network, on a unix socket."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import docker
from docker.errors import DockerException

BRIDGE = "duopack-tests"


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
        "--bridge",
        BRIDGE if network else "none",
        "--iptables=false",
        "--add-runtime",
        f"ascend={shutil.which('runc')}",
        "--storage-driver",
        storage,
    ]
    with _bridge() if network else nullcontext(), (directory / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait(address, process, directory / "dockerd.log")
            yield address
        finally:
            process.terminate()
            process.wait(60)
            for mount in reversed(_mounts_below(directory)):
                subprocess.run(["umount", mount], check=False)
            shutil.rmtree(directory / "data", ignore_errors=True)


@contextmanager
def _bridge() -> Iterator[None]:
    """A bridge that lives as long as the engine; docker-proxy carries what is published on loopback."""
    subprocess.run(["ip", "link", "add", BRIDGE, "type", "bridge"], check=True)
    try:
        subprocess.run(["ip", "addr", "add", "172.31.77.1/24", "dev", BRIDGE], check=True)
        subprocess.run(["ip", "link", "set", BRIDGE, "up"], check=True)
        yield
    finally:
        subprocess.run(["ip", "link", "del", BRIDGE], check=False)


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


def _mounts_below(directory: Path) -> list[str]:
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [point for point in points if point.startswith(f"{directory}/")]
