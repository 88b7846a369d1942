"""What happened to a server: its log from a file, stdin or a container, and what the engine knows of the container."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import DuopackError, quoted
from pipeline.files import CHUNK
from pipeline.serving.diagnosis import Diagnosis, LogReader, State
from pipeline.serving.failures.load import load_failures
from pipeline.serving.failures.match import Table, table_of
from pipeline.serving.logs import lines_of

if TYPE_CHECKING:
    from docker.models.containers import Container

STDIN = "-"
_GZIP = b"\x1f\x8b"
_SHELLS = {"bash", "sh", "ash", "zsh"}
_SIZE = re.compile(r"(?<![a-z0-9.])\d+(?:\.\d+)?b(?![a-z0-9])")


@dataclass(frozen=True)
class ContainerState:
    """What the engine knows of a container."""

    name: str
    command: tuple[str, ...] = ()
    status: str = ""
    exit_code: int = 0
    out_of_memory: bool = False
    error: str = ""
    restarts: int = 0
    unhealthy: bool = False
    health_output: str = ""


def diagnose_log(name: str) -> Diagnosis:
    """The diagnosis of a log file (plain or gzip), of `-` (stdin), or of a container by its name or id.

    Raises DuopackError when there is none of that name, it cannot be read, or nothing is in it.
    """
    if name == STDIN:
        return diagnose_stream(_pieces(sys.stdin.buffer), where="stdin")
    path = Path(name)
    if path.exists():
        with _opened(path) as pieces:
            return diagnose_stream(pieces, where=name)
    return _diagnose_named(name)


def diagnose_stream(chunks: Iterable[bytes], *, where: str, symptoms: tuple[str, ...] = ()) -> Diagnosis:
    """The diagnosis of a log in pieces of any size, with what was seen from outside.

    `symptoms` are lines such as `smoke: the answer is one character over and over: …` (see docs/failures.md).
    Raises DuopackError when there is nothing at all.
    """
    reader = _read(chunks)
    if not reader.lines and not symptoms:
        raise DuopackError(
            "nothing is in the log", where=where, mend="give the file that the server's output goes to"
        )
    return reader.result(symptoms)


def diagnose_container(container: Container, symptoms: tuple[str, ...] = ()) -> Diagnosis:
    """The diagnosis of a container, running or ended: its log, and what the engine knows of its end."""
    from pipeline.serving.container import engine_errors

    with engine_errors(str(container.name)):
        container.reload()
        reader = _read(container.logs(stream=True, timestamps=True, follow=False))
        container.reload()
    state = container_state(str(container.name), container.attrs)
    return reader.result((*symptoms_of(state, reader.result()), *symptoms))


def container_state(name: str, attributes: Mapping[str, Any]) -> ContainerState:
    """The parts of `docker inspect` that tell how a container does."""
    config, state = attributes.get("Config") or {}, attributes.get("State") or {}
    health = state.get("Health") or {}
    last = (health.get("Log") or [{}])[-1]
    return ContainerState(
        name=name,
        command=tuple(config.get("Cmd") or config.get("Entrypoint") or ()),
        status=state.get("Status", ""),
        exit_code=state.get("ExitCode") or 0,
        out_of_memory=bool(state.get("OOMKilled")),
        error=state.get("Error") or "",
        restarts=attributes.get("RestartCount") or 0,
        unhealthy=health.get("Status") == "unhealthy",
        health_output=str(last.get("Output", "")).strip(),
    )


def symptoms_of(state: ContainerState, seen: Diagnosis) -> Iterator[str]:
    """What a container's state says, in the words of the table of known failures."""
    if state.status in {"exited", "dead", "restarting"} and state.exit_code:
        memory = ", killed by its memory limit" if state.out_of_memory else ""
        yield f"container: ended with exit code {state.exit_code}{memory}"
    elif state.out_of_memory:
        yield "container: killed by its memory limit: one of its processes"
    if state.error:
        yield f"container: {quoted(state.error, 400)}"
    if state.unhealthy:
        yield f"container: its health check fails, last with: {quoted(state.health_output)}"
    if state.restarts:
        yield f"container: was restarted {state.restarts} time{'s' if state.restarts > 1 else ''}"
    shell = Path(state.command[-1]).name in _SHELLS if state.command else False
    if shell and seen.state is State.NOTHING:
        yield "container: its command is a shell, and its log has nothing of a server"
    named, model = _SIZE.findall(state.name.lower()), (seen.header.model or "").lower()
    if model and _SIZE.search(model) and any(size not in _SIZE.findall(model) for size in named):
        yield f"container: its name says {', '.join(named)}, and it serves {quoted(model)}"


def _diagnose_named(name: str) -> Diagnosis:
    import docker

    from pipeline.serving.container import engine, engine_errors

    mend = "give a log file that is there, - for stdin, or a container's name ('docker ps -a' lists them)"
    try:
        with engine() as client, engine_errors(name):
            try:
                container = client.containers.get(name)
            except docker.errors.NotFound:
                raise DuopackError(
                    "there is no such file, and no such container", where=quoted(name), mend=mend
                ) from None
            return diagnose_container(container)
    except DuopackError as error:
        if error.where == "docker":
            raise DuopackError(
                f"there is no such file, and {error.what}", where=quoted(name), mend=mend
            ) from error
        raise


def _read(chunks: Iterable[bytes]) -> LogReader:
    reader = LogReader(_table())
    for line in lines_of(chunks):
        reader.add(line)
    return reader


def _table() -> Table:
    return table_of([failure for failures in load_failures().values() for failure in failures])


@contextmanager
def _opened(path: Path) -> Iterator[Iterator[bytes]]:
    """A log file's bytes in pieces, out of gzip when it is a rotated one."""
    import gzip
    import zlib

    mend = "give a log file that you may read"
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == _GZIP
            file.seek(0)
            yield _pieces(gzip.GzipFile(fileobj=file) if compressed else file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DuopackError(
            f"the gzip file is broken: {error}", where=str(path), mend="unpack it first, as far as it goes"
        ) from error
    except OSError as error:
        raise DuopackError(f"cannot be read: {error.strerror}", where=str(path), mend=mend) from error


def _pieces(file: Any) -> Iterator[bytes]:
    """What a file gives, at once where it is a pipe that gives little."""
    read = getattr(file, "read1", file.read)
    while piece := read(CHUNK):
        yield piece
