"""`docker build` through the engine's API: the context goes as a stream, so that it is nowhere copied on our side.

The docker package knows only the classic builder; BuildKit is the same request with `version=2` (moby's
api/swagger.yaml, "ImageBuild"), whose progress comes as protobuf messages (buildkit's control.proto).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from pipeline.errors import DuopackError, quoted
from pipeline.oci.digest import Digest

if TYPE_CHECKING:
    from docker import APIClient

_SECONDS = 6 * 3600
_BUILDKIT_SINCE = (1, 39)
_LOG_TAIL = 15
_TRACE = "moby.buildkit.trace"
_IMAGE = "moby.image.id"
_LOOK = "look at the engine's log and its disk space, then run the same command again"

OnLine = Callable[[str], None]
"""Told what the engine does, line by line."""


class Builder(Enum):
    """Which of the engine's two builders; the values are the API's."""

    CLASSIC = "1"
    BUILDKIT = "2"


@dataclass(frozen=True)
class Recipe:
    """What the engine is asked to build; the context is a tar stream with `dockerfile` in it."""

    context: Iterable[bytes]
    name_tag: str
    platform: str
    dockerfile: str = "Dockerfile"
    builder: Builder = Builder.BUILDKIT
    arguments: Mapping[str, str] = field(default_factory=dict)
    network: str | None = None
    """What RUN steps reach: host, none; absent: the engine's default."""


class Engine:
    """The engine of DOCKER_HOST. Every method raises DuopackError when it cannot."""

    def __init__(self) -> None:
        import docker

        try:
            self._api: APIClient = docker.from_env(timeout=_SECONDS).api
            self._api.ping()
        except Exception as error:
            raise _failure(
                "no engine answers", error, "start it, or check DOCKER_HOST and your permission to use it"
            ) from error

    def build(self, recipe: Recipe, on_line: OnLine) -> Digest:
        """Builds an image and returns its id. An error carries the end of the engine's log."""
        self._require(recipe.builder)
        parameters = {
            "t": recipe.name_tag,
            "dockerfile": recipe.dockerfile,
            "version": recipe.builder.value,
            "platform": recipe.platform,
            "rm": "1",
            "forcerm": "1",
            "buildargs": json.dumps(dict(recipe.arguments)),
            **({"networkmode": recipe.network} if recipe.network else {}),
        }
        api = self._api
        log = _Log(on_line)
        try:
            response = api.post(
                f"{api.base_url}/v{api.api_version}/build",
                params=parameters,
                # The generator's own errors come out of this call as they are.
                data=iter(recipe.context),
                headers={"Content-Type": "application/x-tar"},
                stream=True,
            )
            with response:
                if response.status_code != 200:
                    raise DuopackError(quoted(response.text, 400))
                for line in response.iter_lines():
                    log.take(line)
        except DuopackError as error:
            if error.mend:
                raise
            raise _failure("the engine did not build the image", error, _LOOK, log.tail) from error
        except Exception as error:
            raise _failure("the engine did not build the image", error, _LOOK, log.tail) from error
        if log.image is None:
            raise _failure("the engine did not say which image it has built", None, _LOOK, log.tail)
        return log.image

    def pull(self, repository: str, digest: Digest, platform: str, on_line: OnLine) -> None:
        """Fetches an image by digest, with the login of docker's config, unless it is there."""
        name = f"{repository}@{digest}"
        if self.has(name):
            return
        try:
            for line in self._api.pull(repository, tag=digest, platform=platform, stream=True, decode=True):
                if line.get("error"):
                    raise DuopackError(quoted(str(line["error"]), 400))
                if not line.get("progress"):
                    on_line(quoted(str(line.get("status", ""))))
        except Exception as error:
            raise _failure(
                f"the engine cannot pull {quoted(name)}", error, "log in (docker login), or check its network"
            ) from error

    def push(self, repository: str, tag: str, on_line: OnLine) -> Digest:
        """Sends an image to its registry, with the login of docker's config; the manifest's digest there."""
        found = ""
        try:
            for line in self._api.push(repository, tag=tag, stream=True, decode=True):
                if line.get("error"):
                    raise DuopackError(quoted(str(line["error"]), 400))
                found = (line.get("aux") or {}).get("Digest") or found
                if not line.get("progress"):
                    on_line(quoted(str(line.get("status", ""))))
            return Digest(found)
        except Exception as error:
            raise _failure(
                f"the engine cannot push {quoted(repository)}:{tag}",
                error,
                "log in (docker login), or let duopack write to the registry itself: leave out --builder",
            ) from error

    def has(self, name: str) -> bool:
        """Whether the engine has an image."""
        import docker

        try:
            self._api.inspect_image(name)  # type: ignore[no-untyped-call]
        except docker.errors.ImageNotFound:
            return False
        except Exception as error:
            raise _failure("the engine does not answer", error, _LOOK) from error
        return True

    def _require(self, builder: Builder) -> None:
        version = tuple(int(part) for part in str(self._api.api_version).split(".")[:2])
        if builder is Builder.BUILDKIT and version < _BUILDKIT_SINCE:
            raise DuopackError(
                f"the engine's API {self._api.api_version} has no BuildKit",
                where="docker",
                mend="use --builder docker-classic, or an engine from 18.09 on",
            )


class _Log:
    """What a build says, from either builder."""

    def __init__(self, on_line: OnLine) -> None:
        self.image: Digest | None = None
        self.tail: deque[str] = deque(maxlen=_LOG_TAIL)
        self._on_line = on_line
        self._told: set[str] = set()

    def take(self, line: bytes) -> None:
        """One JSON object of the answer. Raises DuopackError for the one that says what failed."""
        try:
            value = json.loads(line) if line else {}
        except ValueError:
            value = {}
        if not isinstance(value, dict):
            return
        if value.get("error"):
            raise DuopackError(quoted(str(value["error"]), 400))
        if value.get("id") == _TRACE:
            for text in _trace(str(value.get("aux", ""))):
                self._say(text)
        elif isinstance(value.get("aux"), dict) and value["aux"].get("ID"):
            self.image = Digest(str(value["aux"]["ID"]))
        else:
            self._say(str(value.get("stream") or value.get("status") or ""))

    def _say(self, text: str) -> None:
        for line in text.splitlines():
            shown = quoted(line.strip(), 300)
            # BuildKit tells of each step again whenever something about it changes.
            if shown and shown not in self._told:
                self._told.add(shown)
                self.tail.append(shown)
                self._on_line(shown)


def _trace(text: str) -> Iterator[str]:
    """The names of steps and the lines that they print, from a StatusResponse: `vertexes` is field 1, `logs` 3."""
    try:
        for number, body in _fields(base64.b64decode(text, validate=True)):
            wanted = {1: 3, 3: 4}.get(number)  # Vertex.name, VertexLog.msg
            for inner, value in _fields(body) if wanted else ():
                if inner == wanted:
                    yield value.decode(errors="replace")
    except (binascii.Error, ValueError, IndexError):
        return


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The length-delimited fields of a protobuf message, by number."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        kind = key & 7
        if kind == 0:
            _, position = _varint(data, position)
        elif kind == 2:
            size, position = _varint(data, position)
            yield key >> 3, data[position : position + size]
            position += size
        elif kind in {1, 5}:
            position += 8 if kind == 1 else 4
        else:
            raise ValueError("a group, which these messages do not have")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _failure(what: str, error: Any, mend: str, tail: Iterable[str] = ()) -> DuopackError:
    reason = "" if error is None else f": {quoted(str(getattr(error, 'explanation', None) or error), 400)}"
    log = "".join(f"\n  {line}" for line in tail)
    return DuopackError(
        f"{what}{reason}" + (f"; its log ends with:{log}\n" if log else ""), where="docker", mend=mend
    )
