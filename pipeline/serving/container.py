"""A server's container: started through the docker package, watched until it is ready, always removed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.errors import DuopackError, quoted

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

LOG_TAIL = 30
OWNER = "io.duopack.started-by"
"""The label that says who started a container: whoever is that may remove it."""
_PULL_SECONDS = 6 * 3600
_TELL_SECONDS = 30.0
_PUBLISH = (
    "publish it first ('duopack publish KEY'), or load it: duopack build KEY --to docker-daemon:NAME:TAG"
)

OnNote = Callable[[str], None]


@dataclass(frozen=True)
class Server:
    """What to start: `image` runs under `name` and listens at `port` inside; `options` are docker-py's.

    `owner` names the starter; two that may run at the same time have different ones.
    """

    image: str
    name: str
    port: int
    owner: str
    options: dict[str, Any] = field(default_factory=dict)


@contextmanager
def engine() -> Iterator[DockerClient]:
    """The docker engine that DOCKER_HOST names, or the local one. Raises DuopackError when none answers."""
    import docker
    import requests

    try:
        client = docker.from_env(timeout=_PULL_SECONDS)
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
    with engine_errors("asking the engine for its runtimes"):
        return tuple(client.info().get("Runtimes") or ())


def ensure_image(client: DockerClient, image: str, note: OnNote) -> None:
    """Pulls the image when the engine does not have it. Raises DuopackError when it cannot be had."""
    import docker

    with engine_errors(image, _PUBLISH):
        try:
            client.images.get(image)
            return
        except docker.errors.ImageNotFound:
            note(f"the engine does not have {image}: pulling it")
    pull_image(client, image, note)


def pull_image(client: DockerClient, image: str, note: OnNote) -> None:
    """Pulls the image, saying now and then how far it is. Raises DuopackError when it cannot be had."""
    from docker.utils import parse_repository_tag

    repository, tag = parse_repository_tag(image)
    told = time.monotonic()
    with engine_errors(image, _PUBLISH):
        for line in client.api.pull(repository, tag=tag or "latest", stream=True, decode=True):
            if line.get("error"):
                raise DuopackError(
                    f"the engine cannot pull it: {quoted(str(line['error']), 400)}",
                    where=image,
                    mend=_PUBLISH,
                )
            if time.monotonic() - told > _TELL_SECONDS:
                told = time.monotonic()
                note(" ".join(str(line[part]) for part in ("id", "status", "progress") if line.get(part)))


@contextmanager
def running(client: DockerClient, server: Server, note: OnNote) -> Iterator[tuple[Container, str]]:
    """Starts a server with its image's own entrypoint and yields its container and its URL on loopback.

    The engine picks a free port. The container is ended and removed whatever happens; one of the same name
    that a killed run of the same owner left is removed first. Raises DuopackError when it cannot be started.
    """
    import docker

    _remove_leftover(client, server, note)
    with engine_errors(server.image, "check that the image is for this host's architecture"):
        container = client.containers.create(
            server.image,
            name=server.name,
            ports={f"{server.port}/tcp": ("127.0.0.1", 0)},
            labels={OWNER: server.owner},
            **server.options,
        )
    try:
        with engine_errors(
            server.image, "check that the chips' devices exist on this host ('npu-smi info' lists them)"
        ):
            container.start()
            container.reload()
        yield container, _url(container, server.port)
    finally:
        with engine_errors(server.name), suppress(docker.errors.NotFound):
            container.remove(force=True, v=True)


def _remove_leftover(client: DockerClient, server: Server, note: OnNote) -> None:
    import docker

    with engine_errors(server.name):
        try:
            found = client.containers.get(server.name)
        except docker.errors.NotFound:
            return
        if found.labels.get(OWNER) != server.owner:
            raise DuopackError(
                "another container has this name, and it was not started from here",
                where=server.name,
                mend=f"look at it with 'docker ps -a'; if nobody needs it: docker rm -f {server.name}",
            )
        note(f"removing {server.name}, which a run that was killed left behind")
        found.remove(force=True, v=True)


def _url(container: Container, port: int) -> str:
    """Where the engine let the port out. A guess could be another server's."""
    bindings = (container.attrs["NetworkSettings"].get("Ports") or {}).get(f"{port}/tcp") or []
    if bindings:
        return f"http://127.0.0.1:{bindings[0]['HostPort']}"
    if container.status == "running":
        raise DuopackError(
            f"the engine gave the container no port for {port}",
            where=str(container.name),
            mend="the engine needs a network (docker network ls shows 'bridge'), or give a server with --url",
        )
    raise _ended(container)


def wait_until(ready: Callable[[], bool], container: Container, *, limit: float, note: OnNote) -> None:
    """Waits at most `limit` seconds for `ready`.

    Raises DuopackError with the end of the log when the container ends before, or the time is up.
    """
    started = told = time.monotonic()
    while not ready():
        now = time.monotonic()
        with engine_errors(str(container.name)):
            container.reload()
        if container.status in {"exited", "dead"}:
            raise _ended(container)
        if now - started > limit:
            raise _gave_up(f"the server was not ready after {limit / 60:.3g} minutes", container)
        if now - told > _TELL_SECONDS:
            told = now
            note(f"waiting for the server, {now - started:.0f} s: {_log(container, 1, 160)}")
        time.sleep(1.0)


def _ended(container: Container) -> DuopackError:
    code = container.attrs["State"].get("ExitCode")
    why = " (killed: out of memory?)" if code == 137 else ""
    return _gave_up(f"the container ended with exit code {code}{why} before it was ready", container)


def _gave_up(what: str, container: Container) -> DuopackError:
    log = _log(container, LOG_TAIL, 400)
    return DuopackError(
        f"{what}; the end of its log:\n{log}\n" if log else f"{what}, and logged nothing",
        where=str(container.name),
        mend="the log's first error is the cause",
    )


def _log(container: Container, lines: int, width: int) -> str:
    with engine_errors(str(container.name)):
        text = container.logs(tail=lines).decode("utf-8", "replace")
    return "\n".join(quoted(line, width) for line in text.splitlines())


@contextmanager
def engine_errors(
    where: str, mend: str = "look at the engine's log, then run the same command again"
) -> Iterator[None]:
    """Turns what the docker package raises into an error for people."""
    import docker
    import requests

    try:
        yield
    except (docker.errors.DockerException, requests.RequestException) as error:
        said = quoted(str(getattr(error, "explanation", None) or error), 400)
        raise DuopackError(f"the engine refused or failed: {said}", where=where, mend=mend) from error
