"""A server's container: started through the docker package, watched until it is ready, always removed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipeline.errors import DuopackError, quoted

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

LOG_TAIL = 30


@contextmanager
def engine() -> Iterator[DockerClient]:
    """The docker engine that DOCKER_HOST names, or the local one. Raises DuopackError when none answers."""
    import docker
    import requests

    try:
        client = docker.from_env(timeout=600)
        client.ping()
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise DuopackError(
            f"no docker engine answers: {quoted(str(error))}",
            where="docker",
            mend="start it (systemctl start docker), set DOCKER_HOST, or give a running server with --url",
        ) from error
    try:
        yield client
    finally:
        client.close()


def runtimes(client: DockerClient) -> tuple[str, ...]:
    """Names of the runtimes that the engine knows, e.g. runc and ascend."""
    return tuple(client.info().get("Runtimes") or ())


@contextmanager
def running(
    client: DockerClient, image: str, port: int, options: dict[str, Any]
) -> Iterator[tuple[Container, str]]:
    """Starts `image` with its own command and yields it with its URL on loopback; ends and removes it whatever happens.

    `port` is the one inside; the engine picks a free one outside. Raises DuopackError when it cannot be started.
    """
    import docker

    try:
        container = client.containers.create(image, ports={f"{port}/tcp": ("127.0.0.1", 0)}, **options)
    except docker.errors.ImageNotFound as error:
        raise DuopackError(
            "the engine does not have this image", where=image, mend=f"pull it first: docker pull {image}"
        ) from error
    except docker.errors.APIError as error:
        raise _refused(image, error) from error
    try:
        try:
            container.start()
        except docker.errors.APIError as error:
            raise _refused(image, error) from error
        container.reload()
        bindings = container.attrs["NetworkSettings"]["Ports"].get(f"{port}/tcp") or [{}]
        yield container, f"http://127.0.0.1:{bindings[0].get('HostPort', port)}"
    finally:
        container.remove(force=True, v=True)


def wait_until(
    ready: Callable[[], bool], container: Container, *, limit: float, note: Callable[[str], None]
) -> None:
    """Waits at most `limit` seconds for `ready`.

    Raises DuopackError with the end of the log when the container ends before, or the time is up.
    """
    started = told = time.monotonic()
    while not ready():
        now = time.monotonic()
        container.reload()
        if container.status in {"exited", "dead"}:
            code = container.attrs["State"].get("ExitCode")
            why = " (killed: out of memory?)" if code == 137 else ""
            raise _gave_up(f"the container ended with exit code {code}{why} before it was ready", container)
        if now - started > limit:
            raise _gave_up(f"the server was not ready after {limit / 60:.0f} minutes", container)
        if now - told > 30:
            told = now
            last = container.logs(tail=1).decode("utf-8", "replace").strip()
            note(f"waiting for the server, {now - started:.0f} s: {quoted(last, 160)}")
        time.sleep(1.0)


def _gave_up(what: str, container: Container) -> DuopackError:
    log = container.logs(tail=LOG_TAIL).decode("utf-8", "replace")
    shown = "\n".join(quoted(line, 400) for line in log.splitlines())
    return DuopackError(
        f"{what}; the end of its log:\n{shown}\n",
        where=str(container.name),
        mend="the log's first error is the cause",
    )


def _refused(image: str, error: Exception) -> DuopackError:
    return DuopackError(
        f"the engine would not start it: {quoted(str(error), 400)}",
        where=image,
        mend="check that the chips' devices exist on this host and that the image is for its architecture",
    )
