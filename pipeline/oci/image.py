"""Images as values: a config and layers, changed by making new ones. Nothing here reads a clock.

Facts: OCI image-spec 1.1, config.md; Healthcheck is Docker's extension, which docker and podman honour
in OCI configs too. Everything is turned into OCI media types, so that no manifest mixes the two families.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.errors import DuopackError, quoted
from pipeline.oci.digest import Digest
from pipeline.oci.documents import Manifest, canonical, config_platform, parse_object, resolve, same_platform
from pipeline.oci.hashing import pour
from pipeline.oci.model import (
    DOCKER_LAYER_GZIP,
    DOCKER_LAYER_TAR,
    MAX_CONFIG,
    OCI_CONFIG,
    OCI_LAYER_GZIP,
    OCI_LAYER_TAR,
    OCI_LAYER_ZSTD,
    OCI_MANIFEST,
    Blob,
    Descriptor,
    Source,
)
from pipeline.oci.tar import TarLayer

MAX_LAYERS = 120
"""overlay2 stacks 127 at most; some are left for a user's own Dockerfile on top."""

WARN_LAYERS = 70
"""Mounting has been seen to fail near here on some hosts (buildkit issue 4810)."""

EPOCH = "1970-01-01T00:00:00Z"

_NS = 1_000_000_000
_TO_OCI = {
    OCI_LAYER_TAR: OCI_LAYER_TAR,
    OCI_LAYER_GZIP: OCI_LAYER_GZIP,
    OCI_LAYER_ZSTD: OCI_LAYER_ZSTD,
    DOCKER_LAYER_TAR: OCI_LAYER_TAR,
    DOCKER_LAYER_GZIP: OCI_LAYER_GZIP,
    "application/vnd.docker.image.rootfs.diff.tar.zstd": OCI_LAYER_ZSTD,
}


@dataclass(frozen=True)
class Layer:
    """One layer: its blob, and the digest of its uncompressed bytes.

    `diff_id` is None for an uncompressed blob: it is then the blob's own digest, known once it was read.
    """

    blob: Blob
    diff_id: Digest | None = None
    created_by: str = ""
    title: str = ""

    @classmethod
    def of(cls, blob: TarLayer, *, created_by: str = "duopack") -> Layer:
        """A layer of files."""
        return cls(blob, blob.digest, created_by, blob.title)

    @property
    def known_digest(self) -> Digest | None:
        """The blob's digest, when it is known before reading: a base's layers have one."""
        return self.blob.digest


@dataclass(frozen=True)
class Healthcheck:
    """How the engine finds out whether the server answers; times in seconds."""

    test: tuple[str, ...]
    interval: float = 30
    timeout: float = 10
    start_period: float = 0
    retries: int = 3

    def to_json(self) -> dict[str, Any]:
        """Docker's form: durations in nanoseconds."""
        times = {"Interval": self.interval, "Timeout": self.timeout, "StartPeriod": self.start_period}
        nanoseconds = {name: round(seconds * _NS) for name, seconds in times.items()}
        return {"Test": list(self.test), "Retries": self.retries} | nanoseconds


@dataclass(frozen=True)
class Finished:
    """An image whose bytes are settled."""

    config: bytes
    manifest: bytes
    layers: tuple[Descriptor, ...]

    @property
    def digest(self) -> Digest:
        """The digest of the manifest: the image's name everywhere."""
        return Digest.of(self.manifest)


@dataclass(frozen=True)
class Image:
    """A config document, the layers bottom first, and the manifest's annotations.

    `config` is the base's whole document: what this project does not know stays in it. Its `rootfs` and
    the history of new layers are filled in by `finish`. `base_digest` is the digest of the manifest that
    the image was read from, and stays when it is built upon.
    """

    config: Mapping[str, Any]
    layers: tuple[Layer, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    base_digest: Digest | None = None

    def __post_init__(self) -> None:
        if len(self.layers) > MAX_LAYERS:
            raise DuopackError(
                f"the image would have {len(self.layers)} layers; more than {MAX_LAYERS} cannot be mounted",
                where="image",
                mend="put fewer models into one image, or use a base with fewer layers",
            )

    @classmethod
    def scratch(cls, platform: str) -> Image:
        """An image with nothing in it for `os/arch[/variant]`."""
        os_name, _, rest = platform.partition("/")
        arch, _, variant = rest.partition("/")
        return cls(
            {"os": os_name, "architecture": arch, "config": {}} | ({"variant": variant} if variant else {})
        )

    @property
    def platform(self) -> str:
        return config_platform(dict(self.config))

    @property
    def env(self) -> dict[str, str]:
        """The environment of the container, by name."""
        settings = self.config.get("config") or {}
        return dict(text.partition("=")[::2] for text in settings.get("Env") or [])

    @property
    def size(self) -> int:
        """Bytes of all layers as they are stored."""
        return sum(layer.blob.size for layer in self.layers)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know before using the image."""
        if len(self.layers) < WARN_LAYERS:
            return ()
        return (f"the image has {len(self.layers)} layers; some hosts cannot mount {WARN_LAYERS} or more",)

    def with_layers(self, layers: Iterable[Layer]) -> Image:
        """This image with more layers on top."""
        return replace(self, layers=(*self.layers, *layers))

    def with_annotations(self, annotations: Mapping[str, str]) -> Image:
        """This image with annotations added to its manifest."""
        return replace(self, annotations={**self.annotations, **annotations})

    def with_config(
        self,
        *,
        cmd: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        healthcheck: Healthcheck | None = None,
        exposed_ports: Iterable[int] = (),
        working_dir: str | None = None,
    ) -> Image:
        """This image with settings changed; what is not given keeps the base's value, the entrypoint always.

        `env` is merged by name: the base's order, then new names in alphabetical order. `labels` and TCP
        `exposed_ports` are added to the base's.
        """
        document = deepcopy(dict(self.config))
        settings = document["config"] = document.get("config") or {}
        changed: dict[str, Any] = {
            "Cmd": None if cmd is None else list(cmd),
            "Env": _merged_env(settings.get("Env") or [], env) if env else None,
            "Labels": {**(settings.get("Labels") or {}), **labels} if labels else None,
            "Healthcheck": healthcheck.to_json() if healthcheck else None,
            "WorkingDir": working_dir,
        }
        settings.update({key: value for key, value in changed.items() if value is not None})
        ports: dict[str, Any] = {f"{port}/tcp": {} for port in exposed_ports}
        if ports:
            settings["ExposedPorts"] = {**(settings.get("ExposedPorts") or {}), **ports}
        return replace(self, config=document)

    def finish(self, digests: Sequence[Digest]) -> Finished:
        """The image's documents, given the digest of each layer's blob in order."""
        diff_ids = [layer.diff_id or digest for layer, digest in zip(self.layers, digests, strict=True)]
        document = deepcopy(dict(self.config))
        document["rootfs"] = {"type": "layers", "diff_ids": [str(diff_id) for diff_id in diff_ids]}
        document["history"] = self._history()
        document["created"] = EPOCH
        config = canonical(document)
        if len(config) > MAX_CONFIG:
            raise DuopackError(f"the image's config has {len(config)} bytes", where="image")
        layers = tuple(
            Descriptor(layer.blob.media_type, digest, layer.blob.size)
            for layer, digest in zip(self.layers, digests, strict=True)
        )
        manifest: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": Descriptor(OCI_CONFIG, Digest.of(config), len(config)).to_json(),
            "layers": [layer.to_json() for layer in layers],
        }
        if self.annotations:
            manifest["annotations"] = dict(self.annotations)
        return Finished(config, canonical(manifest), layers)

    def _history(self) -> list[dict[str, Any]]:
        """The base's history, and one entry for each layer that it does not cover."""
        history = list(self.config.get("history") or [])
        uncovered = self.layers[_covered(history) :]
        return history + [{"created": EPOCH, "created_by": layer.created_by} for layer in uncovered]


def load_base(source: Source, reference: str, platform: str) -> Image:
    """The image under a reference for a platform `os/arch[/variant]`, ready to be built upon.

    Raises DuopackError for an image that is not there, not for this platform, or not sound.
    """
    resolved = resolve(source, reference, platform)
    manifest = resolved.manifest
    blob = source.blob(manifest.config)
    raw = bytearray()
    pour(blob, raw.extend, lambda _: None)
    config = parse_object(bytes(raw), where=reference, limit=MAX_CONFIG)
    _check_settings(config, reference)
    if not same_platform(config_platform(config), platform):
        found = quoted(config_platform(config), 60)
        raise _bad(
            reference,
            f"the image is for {found} and not for {platform}",
            "use a base for this platform, or --platform",
        )
    diff_ids = _diff_ids(config, manifest, reference)
    # A history that does not tell of every layer is worth nothing, and engines refuse it.
    if _covered(config.get("history") or []) != len(manifest.layers):
        config["history"] = []
    layers = tuple(
        Layer(
            source.blob(replace(layer, media_type=_oci_layer_type(layer, reference))),
            diff_id,
            title=_title(layer),
        )
        for layer, diff_id in zip(manifest.layers, diff_ids, strict=True)
    )
    return Image(config, layers, base_digest=resolved.descriptor.digest)


def _covered(history: list[dict[str, Any]]) -> int:
    return sum(1 for entry in history if not entry.get("empty_layer"))


def _diff_ids(config: dict[str, Any], manifest: Manifest, where: str) -> list[Digest]:
    rootfs = config.get("rootfs")
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if diff_ids is None and not manifest.layers:
        return []
    if not isinstance(diff_ids, list) or not all(isinstance(text, str) for text in diff_ids):
        raise _bad(where, "the image's config has no list of diff_ids")
    if len(diff_ids) != len(manifest.layers):
        raise _bad(
            where, f"the image has {len(manifest.layers)} layers, but its config tells of {len(diff_ids)}"
        )
    return [Digest(text) for text in diff_ids]


def _check_settings(config: dict[str, Any], where: str) -> None:
    """Refuses a config whose parts have other types than with_config and finish build upon."""
    settings = config.get("config") or {}
    history = config.get("history") or []
    if not isinstance(settings, dict) or not isinstance(history, list):
        raise _bad(where, "the image's config is malformed")
    env = settings.get("Env") or []
    maps = [settings.get("Labels") or {}, settings.get("ExposedPorts") or {}, *history]
    sound = isinstance(env, list) and all(isinstance(text, str) for text in env)
    if not sound or not all(isinstance(value, dict) for value in maps):
        raise _bad(where, "the image's config is malformed")


def _merged_env(base: list[str], changes: Mapping[str, str]) -> list[str]:
    for name, value in changes.items():
        if not name or "=" in name or "\0" in name + value:
            raise DuopackError(f"'{quoted(name)}' cannot be an environment variable", where="image")
    names = list(dict.fromkeys(text.partition("=")[0] for text in base))
    values = dict(text.partition("=")[::2] for text in base) | dict(changes)
    return [f"{name}={values[name]}" for name in [*names, *sorted(changes.keys() - set(names))]]


def _oci_layer_type(layer: Descriptor, where: str) -> str:
    if layer.media_type not in _TO_OCI:
        raise _bad(where, f"the layer {layer.digest} has the unknown media type '{quoted(layer.media_type)}'")
    return _TO_OCI[layer.media_type]


def _title(layer: Descriptor) -> str:
    return f"base layer {layer.digest.hex[:12]}"


def _bad(where: str, what: str, mend: str = "use another base image") -> DuopackError:
    return DuopackError(what, where=quoted(where), mend=mend)
