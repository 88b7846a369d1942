"""An image as a Dockerfile: the same layers, one COPY each, and the same config.

Each layer is a directory of the context that is copied onto the root, so no file name needs quoting, and nothing is
touched again in a later layer, which would copy it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import DuopackError, quoted
from pipeline.files import human_size
from pipeline.oci.image import Image
from pipeline.oci.tar import TarEntry, TarLayer

NAME = "Dockerfile"


@dataclass(frozen=True)
class Dockerfile:
    """The text, and the files of the context that its COPY lines name."""

    text: str
    entries: tuple[TarEntry, ...]

    @property
    def context(self) -> TarLayer:
        """The context as a tar stream; the weights are read when it is."""
        return TarLayer((*self.entries, TarEntry(NAME, 0o644, self.text.encode())))


def make_dockerfile(image: Image, base: Image, base_name: str, title: str) -> Dockerfile:
    """What makes `image` from `base`, which the engine knows by the name `base_name`.

    Raises DuopackError for a layer that is not made of files.
    """
    folders = {f"{number:03}": layer for number, layer in enumerate(image.layers[len(base.layers) :], 1)}
    entries: list[TarEntry] = []
    copies: list[str] = []
    for folder, layer in folders.items():
        blob = layer.blob
        if not isinstance(blob, TarLayer):
            raise DuopackError("a layer is not made of files", where="dockerfile")
        entries += [TarEntry(f"{folder}/{one.path}", one.mode, one.content) for one in blob.entries]
        copies += [
            f"# {quoted(layer.title or blob.title, 150)}, {human_size(blob.size)}",
            f"COPY {folder}/ /",
        ]
    lines = [
        f"# {quoted(title, 150)}, made by duopack; the context is streamed by `duopack build --builder docker`.",
        f"FROM {base_name}",
        *copies,
        *_settings(image, base),
    ]
    return Dockerfile("\n".join(lines) + "\n", tuple(entries))


def _settings(image: Image, base: Image) -> Iterator[str]:
    """The instructions for what the config has beyond the base's; the entrypoint is the base's own."""
    settings, before = _of(image), _of(base)
    env = {name: value for name, value in image.env.items() if base.env.get(name) != value}
    yield from _pairs("ENV", env)
    labels, known = settings.get("Labels") or {}, before.get("Labels") or {}
    yield from _pairs("LABEL", {key: text for key, text in labels.items() if known.get(key) != text})
    ports = sorted(set(settings.get("ExposedPorts") or {}) - set(before.get("ExposedPorts") or {}))
    if ports:
        yield f"EXPOSE {' '.join(ports)}"
    if (directory := settings.get("WorkingDir")) and directory != before.get("WorkingDir"):
        yield f"WORKDIR {_word(directory)}"
    health = settings.get("Healthcheck")
    if health and health != before.get("Healthcheck"):
        yield _health(health)
    if settings.get("Cmd") is not None:
        yield f"CMD {json.dumps(settings['Cmd'])}"


def _of(image: Image) -> Mapping[str, Any]:
    return image.config.get("config") or {}


def _pairs(instruction: str, values: Mapping[str, str]) -> Iterator[str]:
    if values:
        rows = [f"{_word(name)}={_word(value)}" for name, value in values.items()]
        yield f"{instruction} " + " \\\n    ".join(rows)


def _word(text: str) -> str:
    """One word of an instruction that expands variables (docker's docs, "Environment replacement").

    Single quotes keep everything as it is; in double ones a backslash keeps what follows.
    """
    if any(not c.isprintable() for c in text):
        raise DuopackError(f"'{quoted(text, 60)}' cannot stand in a Dockerfile", where="dockerfile")
    if re.fullmatch(r"[A-Za-z0-9._-]+", text):
        return text
    if "'" not in text and not text.endswith("\\"):
        return f"'{text}'"
    plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{plain}"'


def _health(health: Mapping[str, Any]) -> str:
    """Durations are nanoseconds in the config."""
    names = {"Interval": "interval", "Timeout": "timeout", "StartPeriod": "start-period"}
    options = [f"--{name}={health[key] / 1e9:g}s" for key, name in names.items() if health.get(key)]
    if health.get("Retries"):
        options.append(f"--retries={health['Retries']}")
    form, *words = health["Test"]
    if form != "CMD":
        raise DuopackError(f"a health check of the form {quoted(str(form), 40)}", where="dockerfile")
    return f"HEALTHCHECK {' '.join(options)} CMD {json.dumps(words)}"
