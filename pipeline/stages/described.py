"""What an image of ours says of itself: profiles, chips and ports, from the label that carries its launch.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import DuopackError, UsageError, quoted
from pipeline.oci.documents import config_platform, parse_object, resolve
from pipeline.oci.model import MAX_CONFIG, Source
from pipeline.serving.container import engine_errors
from pipeline.stages.containers import LABELS

if TYPE_CHECKING:
    from docker import DockerClient


@dataclass(frozen=True)
class Served:
    """One profile of an image, as the image's launch.json has it."""

    profile: str
    script: str
    served: str
    model: str
    ranks: int
    port: int


@dataclass(frozen=True)
class Described:
    """What an image says of itself; `size` is that of its layers in bytes, and `ids` are the names under which an
    engine may know it: digests of config, manifest and index.
    """

    name: str
    platform: str
    default: str
    profiles: tuple[Served, ...]
    size: int = 0
    ids: frozenset[str] = frozenset()

    def profile(self, name: str | None) -> Served:
        """A profile by name; the image's own command when none is named. Raises UsageError."""
        wanted = name or self.default
        found = next((one for one in self.profiles if one.profile == wanted), None)
        if found is None:
            known = ", ".join(one.profile for one in self.profiles)
            raise UsageError(
                f"the image has no profile '{quoted(wanted)}'", where=self.name, mend=f"take one of {known}"
            )
        return found


def describe_registry(source: Source, wanted: str, name: str, platform: str) -> Described:
    """Reads an image's config where it lies; nothing is pulled."""
    resolved = resolve(source, wanted, platform)
    data = b"".join(source.blob(resolved.manifest.config).read())
    config = parse_object(data, where=name, limit=MAX_CONFIG)
    labels = (config.get("config") or {}).get("Labels") or {}
    ids = {str(resolved.manifest.config.digest), str(resolved.descriptor.digest)}
    size = sum(layer.size for layer in resolved.manifest.layers)
    return _described(name, labels, config_platform(config), size, frozenset(ids))


def describe_engine(client: DockerClient, name: str) -> Described | None:
    """The same of an image that the engine has; None when it has none of this name."""
    import docker

    with engine_errors(name):
        try:
            image = client.images.get(name)
        except docker.errors.ImageNotFound:
            return None
    platform = f"{image.attrs.get('Os', 'linux')}/{image.attrs.get('Architecture', '')}"
    return _described(name, image.labels, platform, 0, frozenset({str(image.id)}))


def _described(
    name: str, labels: Mapping[str, Any], platform: str, size: int, ids: frozenset[str]
) -> Described:
    where, mend = quoted(name), "build it with duopack, or start it with docker by hand"
    text = labels.get(f"{LABELS}launch")
    if not text:
        raise DuopackError(
            "the image does not say what it serves: it is not one of duopack's", where=where, mend=mend
        )
    try:
        launch = json.loads(text)
        profiles = tuple(
            Served(
                profile=_text(one["name"]),
                script=_text(one["script"]),
                served=_text(one["served_name"]),
                model=_text(model["title"]),
                ranks=_number(one["tensor_parallel"], 64),
                port=_number(one["port"], 65535),
            )
            for model in launch["models"]
            for one in model["profiles"]
        )
        default = _text(launch["default"])
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise DuopackError(
            f"what the image says of itself cannot be read ({type(error).__name__})",
            where=where,
            mend="build it again",
        ) from error
    return Described(name, platform, default, profiles, size, ids)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value or not value.isprintable() or len(value) > 1000:
        raise ValueError("no text")
    return value


def _number(value: object, most: int) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError("no number")
    return value
